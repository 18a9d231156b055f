"""The demo: a simulated 4 x V100 machine, from bare to a served model that answers.

Usage: python -m tests.demo [ANSIBLE-PLAYBOOK OPTION ...] starts the lab machine and a file server with the demo model,
writes both into inventories/demo/lab.yml, and runs site.yml on it. Run again, it changes nothing.
`python -m tests.demo prepare LAB INVENTORY_FILE` does all but the run, for tests that need such a machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import yaml

from tests.lab.paths import Paths

ROOT = Path(__file__).resolve().parent.parent
INVENTORY = ROOT / "inventories" / "demo"
LAB = [sys.executable, "-m", "tests.lab"]


def step(text: str) -> None:
    print(f"--- {text}", flush=True)


def lab(*words: str) -> str:
    """Run a lab command; its last line is its answer, everything before it is passed through."""
    done = subprocess.run([*LAB, *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines() or [""]
    for line in lines[:-1]:
        print(line, flush=True)
    return lines[-1]


def prepare(name: str, inventory: Path, hosts: int = 1) -> None:
    """Start the lab ``name`` with a served model and write its connection details to ``inventory``."""
    models = Paths.from_environment().cache / "models" / "demo"
    step("the demo's model: a small GGUF of the architecture qwen4exp, in two shards")
    subprocess.run([sys.executable, "-m", "tests.lab.demo_model", "--out", str(models)], cwd=ROOT, check=True)
    step(f"the lab machine: a bare server with systemd, apt, SSH and four simulated V100 cards (lab {name})")
    # It says it is Ubuntu 22.04 and has kernel and driver packages of that release's names, which hold the simulator.
    up = ["up", name, "-n", str(hosts), "--gpus", "v100x4", "--claims", "ubuntu-22.04", "--inventory", str(inventory)]
    lab(*up)
    base_url = lab("serve", name, str(models)).rstrip("/")
    manifest = json.loads((models / "manifest.json").read_text(encoding="utf-8"))
    files = [
        {"name": entry["name"], "url": f"{base_url}/{entry['name']}", "size": entry["size"], "sha256": entry["sha256"]}
        for entry in manifest["files"]
    ]
    # For -e volta_primary_engine=ollama: a stand-in in an archive like Ollama's, and a registry with one model.
    beside = Paths.from_environment().cache / "ollama" / "demo"
    publish = [sys.executable, "-m", "tests.lab.ollama", "publish", str(beside), "--form", "tar.zst"]
    told = json.loads(subprocess.run(publish, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)
    address = lab("serve", name, str(beside)).rstrip("/")
    ((version, release),) = told["releases"].items()
    ollama = {"url": address, "version": version, "sha256": release["sha256"]["tar.zst"]}
    # The stand-in looks there for the registry that stands for registry.ollama.ai.
    setting = f"echo '{json.dumps({'registry': address})}' > /etc/ollama-standin.json"
    for number in range(1, hosts + 1):
        lab("exec", name, f"{name}-{number}", "--", "sh", "-c", setting)
    lab(*up, "--var", f"demo_model_files={json.dumps(files)}", "--var", f"demo_ollama={json.dumps(ollama)}")


def main(options: list[str]) -> int:
    if options[:1] == ["prepare"]:
        prepare(options[1], Path(options[2]))
        return 0
    prepare("demo", INVENTORY / "lab.yml")
    step("ansible-playbook site.yml -i inventories/demo")
    status, output = shown(["ansible-playbook", "site.yml", "-i", str(INVENTORY.relative_to(ROOT)), *options])
    if status == 0 and not options:
        print(how_to_ask(output), flush=True)
    return status


def shown(argv: list[str]) -> tuple[int, list[str]]:
    """Run a program, pass its output through as it comes, and keep it without colours; its exit status first."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        environment.setdefault("ANSIBLE_FORCE_COLOR", "1")
    kept = []
    with subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            kept.append(re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip("\n")))
    return process.returncode, kept


def hand_over_card(output: list[str]) -> str:
    """The card that role llama_server ends with, out of Ansible's output; empty where there is none."""
    heads = [at for at, line in enumerate(output) if line.startswith("TASK [") and "Hand over the endpoint]" in line]
    if not heads:
        return ""
    rest = output[heads[-1] :]
    end = next((at for at, line in enumerate(rest) if line.startswith(("PLAY ", "TASK [")) and at), len(rest))
    begin = next((at for at, line in enumerate(rest) if line.strip() == "msg: |-"), end)
    return textwrap.dedent("\n".join(rest[begin + 1 : end])).strip()


def how_to_ask(output: list[str]) -> str:
    """What a person does next: the card again, below the recap, and the demo's key, which is no secret."""
    settings = yaml.safe_load((INVENTORY / "group_vars" / "gpu_servers.yml").read_text(encoding="utf-8"))
    return (
        f"\n{hand_over_card(output)}\n\n"
        "The answer above is random words: the demo's model is made, not trained. Its key is no secret:\n"
        f"  export OPENAI_API_KEY={settings['llama_server_api_keys'][0]}\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
