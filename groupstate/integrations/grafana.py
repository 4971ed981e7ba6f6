"""Where the Grafana dashboard lies: `python -m groupstate.integrations.grafana` prints its path.

It is made for the metrics of `groupstate.integrations.prometheus`; import it in Grafana as it is.
"""

from pathlib import Path
from typing import Final

DASHBOARD: Final = Path(__file__).with_name("grafana.json")

if __name__ == "__main__":
    print(DASHBOARD)
