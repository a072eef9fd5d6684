"""Compiles the key table, if there is a C compiler."""

from setuptools import Extension, setup

SOURCE = "src/pointsman_native/key_table.pyx"

setup(
    ext_modules=[
        Extension("pointsman_native.key_table", [SOURCE], optional=True, extra_compile_args=["-O2", "-g0"]),
    ]
)
