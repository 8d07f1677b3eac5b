"""`specserve support-bundle`: one file for whoever is asked for help, without secrets or text.

Versions, settings, doctor's findings, metrics, pools and the rounds of recent requests: from what
runs (--url, --orchestrator-address, --metrics-url), and from this machine (--config). It holds no
key, no certificate, no prompt, no answer and no token. What could not be got is listed in it, and
printed.

Exit code: 0 all that was asked for is in it, 1 some of it is not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from specserve.errors import ConfigurationError
from specserve.serve_args import ServeArgs
from specserve.tools.client_access import (
    add_key_flag,
    add_tls_flags,
    check_access,
    key_headers,
    tls_of,
)
from specserve.tools.speculation import resolve
from specserve.tools.support_bundle import archive, here
from specserve.tools.support_bundle.collection import Collection
from specserve.tools.support_bundle.redaction import Redactor, secrets_of
from specserve.tools.support_bundle.running import take_gateway, take_metrics, take_orchestrator
from specserve.tools.terminal import say

MAX_REQUESTS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve support-bundle`."""
    parser.description = __doc__
    parser.add_argument(
        "--output",
        metavar="PATH",
        help="a file NAME.tar.gz, or a folder to make (default: specserve-support-TIME.tar.gz)",
    )
    group = parser.add_argument_group("what runs")
    group.add_argument("--url", metavar="URL", help="a gateway, such as http://127.0.0.1:8000")
    add_key_flag(group)
    group.add_argument(
        "--orchestrator-address",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="an orchestrator; give it once per orchestrator, or name a host that stands for all",
    )
    group.add_argument(
        "--metrics-url",
        metavar="URL",
        action="append",
        default=[],
        help="a /metrics of a draft, target or orchestrator; may be given again",
    )
    group.add_argument(
        "--num-requests", type=int, default=20, metavar="N", help="recent requests, with rounds"
    )
    add_tls_flags(parser)
    group = parser.add_argument_group("this machine")
    group.add_argument("--config", metavar="FILE", help="file of settings that is served")
    group.add_argument(
        "--doctor",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="examine the pair of --config, or the embedded one, on this machine",
    )


def run(args: argparse.Namespace) -> int:
    """Collect, write, and say what is in it."""
    check_access(args, both=True)
    if not 1 <= args.num_requests <= MAX_REQUESTS:
        raise ConfigurationError(
            f"--num-requests: found {args.num_requests}, wanted 1 to {MAX_REQUESTS}"
        )
    headers, tls = key_headers(args.api_key_from), tls_of(args)
    addresses = [one for given in args.orchestrator_address for one in resolve(given)]
    moment = time.gmtime()
    name = time.strftime("specserve-support-%Y%m%d-%H%M%S.tar.gz", moment)
    path = Path(args.output or name)
    archive.reserve(path)
    key = headers.get("authorization", "").removeprefix("Bearer ")
    found = Collection(Redactor([key, *secrets_of(os.environ)]))
    _take_here(found, args)
    if args.url:
        take_gateway(found, args.url, headers, args.num_requests)
    else:
        found.leave_out("gateway/", "not asked for: --url")
    for number, address in enumerate(addresses, 1):
        take_orchestrator(found, number, address, tls, args.num_requests)
    if not addresses:
        found.leave_out("orchestrator-1/", "not asked for: --orchestrator-address")
    for number, url in enumerate(args.metrics_url, 1):
        take_metrics(found, number, url)
    made = time.strftime("Made by `specserve support-bundle` at %Y-%m-%d %H:%M:%S UTC.", moment)
    contents = found.contents(made, _NOTES)
    archive.write(path, {"contents.txt": contents, **found.files})
    say(contents.rstrip())
    say(f"\n{path}: read it before you hand it on")
    return 1 if found.num_failures else 0


_NOTES = [
    "Secrets, prompts, answers and tokens are left out. Ids of requests are as clients chose them.",
    "Requests of a gateway are those of the key's own tenant; an orchestrator tells all.",
]


def _take_here(found: Collection, args: argparse.Namespace) -> None:
    found.take("versions.json", here.versions)
    found.take("environment.json", lambda: here.environment(os.environ))
    settings: ServeArgs | None = None
    if args.config:
        settings = found.take("settings.json", lambda: here.settings(args.config), here.shown)
        if settings is not None:
            found.take("secret-files.json", lambda: here.secret_files(settings))
    else:
        found.leave_out("settings.json", "not asked for: --config")
    if not args.doctor:
        found.leave_out("doctor.json", "not asked for: --no-doctor")
    elif args.config and settings is None:
        found.leave_out("doctor.json", "the settings that it would examine are missing")
    else:
        found.take("doctor.json", lambda: here.doctor(settings))
