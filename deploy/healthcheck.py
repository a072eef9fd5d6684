"""Health check of a container: exits 0 when the path given (`/health` or `/readyz`) answers 200 on the service's admin
port, or its only one."""

import os
import sys
from urllib.error import URLError
from urllib.request import urlopen

port = os.environ.get("POINTSMAN_ADMIN_PORT") or os.environ["POINTSMAN_PORT"]
try:
    with urlopen(f"http://127.0.0.1:{port}{sys.argv[1]}", timeout=2):
        pass
except (URLError, OSError) as error:
    sys.exit(f"{sys.argv[1]}: {error}")
