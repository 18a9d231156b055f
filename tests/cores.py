"""Unit tests, syntax and documentation on one end of the supported range of ansible-core.

Usage: python -m tests.cores PYTHON_VERSION. The lock file resolves one ansible-core per controller Python (2.17 for
3.10, 2.21 for 3.12 and newer), so the interpreter chooses the core. Where that interpreter does not exist the run says
so and is skipped: CI machines have it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Long tests of the lab's own code, of real compilers and of real web servers; the tier `unit` runs them.
LEFT_OUT = (
    "tests/unit/engine/test_run.py",
    "tests/unit/engine/test_ship.py",
    "tests/unit/gpu_simulator",
    "tests/unit/lab",
    "tests/unit/ollama_standin",
    "tests/unit/transfer/test_servers.py",
)


def find_python(version: str) -> str | None:
    """An interpreter of this version that starts: on PATH or below pyenv's versions (its shims need a setting)."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python{version}")))]
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def run(argv: list[str], env: dict[str, str], quiet: bool = False) -> None:
    print("+", " ".join(argv), flush=True)
    subprocess.run(argv, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL if quiet else None)


def documented(name: str, kind: str, env: dict[str, str]) -> None:
    """Fail unless ansible-doc shows ``name``; its exit status is 0 also for what it does not find."""
    argv = ["ansible-doc", "-t", kind, name]
    print("+", " ".join(argv), flush=True)
    env = {**env, "ANSIBLE_NOCOLOR": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    first = done.stdout.lstrip().splitlines()[:1]
    if not first or name not in first[0].replace("*", " ").split():
        sys.exit(f"ansible-doc shows no {kind} {name}: {done.stderr.strip() or first}")


def main(version: str) -> int:
    python = find_python(version)
    if python is None:
        print(f"SKIPPED: no python{version} on this machine (looked on PATH and below pyenv's versions)")
        return 0
    venv = ROOT / f".venv-py{version}"
    env = {**os.environ, "PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(venv)}
    sync = {**env, "UV_PROJECT_ENVIRONMENT": str(venv)}
    run([str(Path(sys.executable).parent / "uv"), "sync", "-q", "--frozen", "--extra", "dev", "--python", python], sync)
    run(["ansible", "--version"], env)
    left_out = [f"--ignore={path}" for path in LEFT_OUT]
    run([str(venv / "bin" / "python"), "-m", "pytest", "-q", "tests/unit", *left_out], env)
    print(f"left out, since no ansible-core has a part in them: {', '.join(LEFT_OUT)}")
    playbooks = [ROOT / "site.yml", *sorted((ROOT / "playbooks").glob("*.yml"))]
    for playbook in playbooks:
        run(["ansible-playbook", "--syntax-check", "-i", "inventories/lab", str(playbook.relative_to(ROOT))], env, True)
    modules = [path.stem for path in sorted((ROOT / "plugins" / "modules").glob("*.py")) if path.stem != "__init__"]
    for module in modules:
        documented(f"volta.llm.{module}", "module", env)
    filters = [path.stem for path in sorted((ROOT / "plugins" / "filter").glob("*.yml"))]
    for name in filters:
        documented(f"volta.llm.{name}", "filter", env)
    for role in sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir()):
        documented(f"volta.llm.{role}", "role", env)
    counted = f"{len(playbooks)} playbooks, {len(modules)} modules, {len(filters)} filters"
    print(f"{counted} and all roles are read by this core")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
