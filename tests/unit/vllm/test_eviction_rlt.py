"""The plug-in's copy of the randomised leaf token is the simulator's, to the letter."""

from inspect import getsource

from pointsman.simulation import eviction_rlt as simulated
from pointsman_vllm import eviction_rlt as plugged_in


def test_the_plug_in_evicts_by_the_same_code_as_the_simulator() -> None:
    assert getsource(plugged_in.RandomisedLeafToken) == getsource(simulated.RandomisedLeafToken)
