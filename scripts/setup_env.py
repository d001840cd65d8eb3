#!/usr/bin/env python3
"""Make the project's virtual environment with the newest suitable Python. Standard library only.

    python3 scripts/setup_env.py [--venv .venv] [--extras gguf,test] [--python PATH]

Does nothing when the environment already fits (see ``_stamp``). A set-up that was interrupted while
pip was writing is thrown away and made anew. Two set-ups of one environment wait for each other.
Written so that an old ``python3`` can run it and find a newer one.
"""

from __future__ import annotations

import argparse
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
# Newest first. jax 0.11 needs 3.12; with 3.11 pip picks jax 0.10.2. Newer Pythons are not tested.
PREFERRED = ("3.13", "3.12", "3.11")
ATTEMPTS = 3
NETWORK_ERROR = re.compile(
    r"NewConnectionError|ConnectionError|Connection (?:reset|refused|aborted|broken)|timed out"
    r"|ReadTimeout|Max retries|Temporary failure in name resolution|ProtocolError|IncompleteRead"
    r"|HTTP error 5\d\d|50[0234] Server Error|Network is unreachable",
    re.IGNORECASE,
)
# pip prints this when it starts to change the environment; before it, a failure left it as it was.
PIP_WRITES = "Installing collected packages"
PROBE = (
    "import sys, venv, ensurepip;"
    "print('%d.%d.%d' % sys.version_info[:3]);"
    "print(getattr(sys, '_base_executable', None) or sys.executable)"
)
READY = (
    "import importlib.metadata as m, jax, numpy, tokenizers;"
    "print(', '.join(n + ' ' + m.version(n) for n in ('jax', 'jaxlib', 'flax', 'numpy')))"
)


class SetupError(Exception):
    """A failure with a message for the user; `wrote`: pip may have left the environment broken."""

    wrote = True


def say(message: str) -> None:
    print("setup: " + message, flush=True)


def probe(command: str) -> tuple[tuple[int, ...], str, str] | None:
    """(version tuple, version string, real executable) of an interpreter, or None if unusable.

    A pyenv shim may exist and still refuse to run; a Debian Python may lack ensurepip.
    """
    try:
        result = subprocess.run(
            [command, "-c", PROBE], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = result.stdout.split("\n")
    if result.returncode != 0 or len(lines) < 2:
        return None
    return tuple(int(part) for part in lines[0].split(".")), lines[0], lines[1].strip()


def candidates() -> Iterator[str]:
    """Interpreters to try, newest first; last the one that runs this script."""
    for version in PREFERRED:
        found = shutil.which("python" + version)
        if found:
            yield found
        pattern = os.path.expanduser(f"~/.pyenv/versions/{version}*/bin/python3")
        # 3.13.10 is newer than 3.13.9
        yield from sorted(glob.glob(pattern), key=_natural, reverse=True)
    yield sys.executable


def _natural(text: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def choose_python(wanted: str | None = None) -> tuple[tuple[int, ...], str, str]:
    """The interpreter to use. Raises SetupError when there is none."""
    oldest = f"{OLDEST[0]}.{OLDEST[1]}"
    if wanted:
        info = probe(shutil.which(wanted) or wanted)
        if info is None:
            raise SetupError(f"{wanted} does not run, or lacks the venv and ensurepip modules")
        if info[0] < OLDEST:
            raise SetupError(f"{wanted} is Python {info[1]}, need >= {oldest}")
        return info
    for command in candidates():
        info = probe(command)
        if info is not None and info[0] >= OLDEST:
            return info
    raise SetupError(
        f"no suitable Python: need >= {oldest} with the venv and ensurepip modules (Debian and "
        f"Ubuntu: package python3-venv); this is Python {sys.version.split()[0]}"
    )


def run_pip(python: str, arguments: list[str], log: str) -> None:
    """Run pip, again after a network error. Raises SetupError with pip's own error lines."""
    command = [python, "-m", "pip", *arguments]
    for attempt in range(1, ATTEMPTS + 1):
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(command)}\n{result.stdout}\n")
        if result.returncode == 0:
            return
        network = NETWORK_ERROR.search(result.stdout)
        if not network or attempt == ATTEMPTS:
            break
        say(f"network error ({network.group(0)}), attempt {attempt + 1} of {ATTEMPTS}")
        time.sleep(5 * attempt)
    # Errors of an inner pip (the one that fetches the build back end) come indented.
    output = [line.strip() for line in result.stdout.splitlines()]
    errors = [line for line in output if line.startswith("ERROR:")]
    lines = errors[-3:] or output[-5:]
    error = SetupError(
        f"pip failed with exit status {result.returncode} (whole output: {log})\n  "
        + "\n  ".join(lines)
    )
    error.wrote = PIP_WRITES in result.stdout
    raise error


def _stamp(extras: list[str], version: str) -> dict[str, object]:
    """What the environment was made from; a different value means that it has to be updated."""
    pyproject = (ROOT / "pyproject.toml").read_bytes()
    return {
        "pyproject": hashlib.sha256(pyproject).hexdigest(),
        "python": version,
        "extras": sorted(extras),
    }


def _read_stamp(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def up_to_date(venv: Path, stamp_file: Path, extras: list[str], wanted: str | None) -> bool:
    """Whether the environment was made from this pyproject.toml and holds these extras."""
    stamp = _read_stamp(stamp_file)
    python = venv / "bin" / "python"
    if not stamp or not python.exists():
        return False
    expected = _stamp(stamp.get("extras", []), str(stamp.get("python")))
    if stamp != expected or not set(extras) <= set(stamp["extras"]):
        return False
    if wanted and choose_python(wanted)[1] != stamp["python"]:
        return False
    info = probe(str(python))  # the Python under the environment may have been removed or changed
    return info is not None and info[1] == stamp["python"]


def make_venv(venv: Path, python: str, version: str, interrupted: bool) -> None:
    """Create the environment, or keep the one that is there if it is sound."""
    if venv.exists():
        info = probe(str(venv / "bin" / "python"))
        pip = venv / "bin" / "pip"
        if not interrupted and info is not None and info[1] == version and pip.exists():
            return
        if any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists() and not interrupted:
            raise SetupError(f"{venv} exists and is no virtual environment: move it away")
        reason = "was left unfinished" if interrupted else "does not fit"
        say(f"{venv} {reason}, making it anew")
        shutil.rmtree(str(venv))
    say(f"creating {venv} with Python {version}")
    result = subprocess.run(
        [python, "-m", "venv", str(venv)], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        output = (result.stdout + result.stderr).strip()
        raise SetupError(f"could not create {venv}: {output[-500:]}")


def set_up(venv: Path, extras: list[str], wanted: str | None, state: TextIO) -> None:
    """Bring the environment up to date. `state` is the lock file; its text marks a write."""
    stamp_file = venv / ".sparda_jax_setup.json"
    interrupted = bool(state.read())
    if not interrupted and up_to_date(venv, stamp_file, extras, wanted):
        return
    start = time.monotonic()
    _, version, python = choose_python(wanted)
    _mark(state, "writing\n")
    make_venv(venv, python, version, interrupted)
    extras = sorted(set(extras) | set(_read_stamp(stamp_file).get("extras", [])))
    log = str(venv / "setup.log")
    names = ",".join(extras)
    say(f"installing the packages with pip, extras: {names} (a few minutes at first)")
    venv_python = str(venv / "bin" / "python")
    target = f"{ROOT}[{names}]" if extras else str(ROOT)
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    try:
        run_pip(venv_python, ["install", *options, "--editable", target], log)
    except SetupError as error:
        if not error.wrote:
            _mark(state, "")
        raise
    check = subprocess.run([venv_python, "-c", READY], capture_output=True, text=True, check=False)
    if check.returncode != 0:
        raise SetupError("the installed packages do not import: " + check.stderr.strip()[-500:])
    stamp_file.write_text(json.dumps(_stamp(extras, version)) + "\n", encoding="utf-8")
    _mark(state, "")
    seconds = time.monotonic() - start
    say(f"ready in {seconds:.0f} s: Python {version}, {check.stdout.strip()}")


def _mark(state: TextIO, text: str) -> None:
    state.seek(0)
    state.truncate()
    state.write(text)
    state.flush()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--venv", default=".venv", help="folder of the environment (%(default)s)")
    parser.add_argument("--extras", default="gguf", help="pyproject extras (%(default)s)")
    parser.add_argument("--python", help="interpreter to use instead of the newest one found")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    venv = Path(os.path.abspath(os.path.join(str(ROOT), os.path.expanduser(arguments.venv))))
    extras = [extra for extra in arguments.extras.split(",") if extra]
    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        with open(str(venv) + ".lock", "a+", encoding="utf-8") as state:
            fcntl.flock(state, fcntl.LOCK_EX)
            state.seek(0)
            set_up(venv, extras, arguments.python, state)
    except (SetupError, OSError) as error:
        print(f"setup: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the next run starts afresh", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
