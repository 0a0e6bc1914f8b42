"""Send damaged requests to a service, and say how it dealt with them.

    python scripts/fuzz_service.py --count 5000

Starts a service of the digits network in this process, on a free port of this machine. Exits with 1
if any answer is a 5xx, has no reason in the form of all refusals, or if a refused request has
changed a stream. With `--schemathesis N`, and where that program is installed (`pip install
schemathesis`; it is in no extra), it also tries N examples of each operation of /openapi.json.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import ttapca
from fuzz.service_campaign import Campaign, Findings
from serving.servers import Running
from ttapca import networks
from ttapca.datasets import TensorBatches, read_digits
from ttapca.serving import StreamPool
from ttapca.serving.http_server import DrainingServer, listen
from ttapca.serving.service import Service, ServiceFacts


def main() -> int:
    options = _options()
    console = Console()
    with _service() as (server, pool):
        with closing(Campaign(server.http, pool, options.seed)) as campaign:
            findings = campaign.run(
                options.count, lambda numbers: track(numbers, "sending requests", console=console)
            )
        console.print(_table(findings))
        for fault in findings.faults[: options.show]:
            console.print(fault, markup=False)
        failed = bool(findings.faults)
        if options.schemathesis:
            failed |= _schemathesis(server, options.schemathesis, console)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=5_000, help="how many requests")
    parser.add_argument("--seed", type=int, default=0, help="which requests")
    parser.add_argument("--show", type=int, default=40, help="how many faults to list")
    parser.add_argument("--schemathesis", type=int, default=0, help="examples of each operation")
    return parser.parse_args()


@contextmanager
def _service() -> Iterator[tuple[Running, StreamPool]]:
    network = networks.load("digits-small-cnn")
    fitted = ttapca.fit(network, "conv1", TensorBatches(read_digits("train"), 250))
    with StreamPool(network, fitted) as pool:
        service = Service(pool, ServiceFacts("digits", "conv1", tuple("0123456789")))
        server = Running(DrainingServer(service), listen("127.0.0.1", 0))
        try:
            yield server, pool
        finally:
            server.end()
            service.close()


def _table(findings: Findings) -> Table:
    statuses = sorted({status for _, status in findings.statuses})
    table = Table("kind", *map(str, statuses), box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for kind in dict.fromkeys(kind for kind, _ in findings.statuses):
        counts = (findings.statuses[kind, status] for status in statuses)
        table.add_row(kind, *(str(count or "") for count in counts))
    totals = (
        sum(findings.statuses[each] for each in findings.statuses if each[1] == status)
        for status in statuses
    )
    table.add_row("all", *map(str, totals), style="bold")
    return table


def _schemathesis(server: Running, examples: int, console: Console) -> bool:
    """Return whether schemathesis found an answer that must not be."""
    program = shutil.which("schemathesis")
    if program is None:
        console.print("schemathesis is not installed: pip install schemathesis")
        return True
    host, port = server.address
    words = [program, "run", f"http://{host}:{port}/openapi.json", "--max-examples", str(examples)]
    words += ["--checks", "not_a_server_error,response_schema_conformance,status_code_conformance"]
    with TemporaryDirectory() as folder:  # it leaves a folder of its own behind
        return subprocess.run(words, check=False, cwd=folder).returncode != 0


if __name__ == "__main__":
    sys.exit(main())
