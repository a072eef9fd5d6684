"""Health check of a container: exits 0 when the path given (`/health` or `/readyz`) answers 200 on the service's port."""

import os
import sys
from urllib.error import URLError
from urllib.request import urlopen

try:
    with urlopen(f"http://127.0.0.1:{os.environ['POINTSMAN_PORT']}{sys.argv[1]}", timeout=2):
        pass
except (URLError, OSError) as error:
    sys.exit(f"{sys.argv[1]}: {error}")
