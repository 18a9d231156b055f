# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A stand-in and a registry that run for a test, in a folder of its own and on free ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ..gpu_simulator import gpu_simulator
from .archive import LIBRARIES, make_release
from .registry import RegistryHandler, RegistryServer, publish_model

START_TIMEOUT = 30
#: The simulator as nvidia-smi. As a module it is compiled once, not at each call.
SMI = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.lab.gpu_simulator.gpu_simulator import main
main(["nvidia-smi", *sys.argv[1:]])
"""


class Registry:
    """A registry on loopback, with ``volta-small`` in it. ``published`` are the digests of what was put there."""

    def __init__(self, folder: Path, handler: type[RegistryHandler] = RegistryHandler) -> None:
        self.folder = folder
        self.published = publish_model(folder)
        self.requests: list[tuple[str, str, str | None]] = []
        seen = self.requests

        class Recorded(handler):  # type: ignore[valid-type,misc]
            def log_message(self, *_: object) -> None:
                """A test's output is no place for it."""

            def answer(self, send_body: bool) -> None:
                seen.append((self.command, self.path, self.headers.get("Range")))
                super().answer(send_body)

        self._server = RegistryServer(("127.0.0.1", 0), folder, Recorded)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def host(self) -> str:
        """As it stands in a model's name: ``127.0.0.1:5000``."""
        return self.url.removeprefix("http://")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Standin:
    """An unpacked release that serves. With ``driver`` the machine has the GPU simulator's cards under that driver."""

    def __init__(
        self,
        folder: Path,
        version: str = "0.24.0",
        *,
        registry: str | None = None,
        driver: str | None = None,
        profile: str = "v100x4",
        libraries: Iterable[str] = LIBRARIES,
        broken: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.store = folder / "models"
        self.program = folder / "release" / "bin" / "ollama"
        self._switches = folder / "switches.json"
        self._log = folder / "serve.log"
        release = make_release(folder, version, ("tgz",), libraries=libraries, broken=broken)
        with tarfile.open(release.files["tgz"]) as archive:
            # Python 3.13 warns where none is named, and the oldest 3.10 knows none.
            archive.extractall(folder / "release", **({"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}))
        tools = folder / "tools"
        tools.mkdir()
        self.environment = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "OLLAMA_MODELS": str(self.store),
            "OLLAMA_STANDIN": str(self._switches),
            **(environment or {}),
        }
        if registry:
            self.environment["OLLAMA_STANDIN_REGISTRY"] = registry
        smi = tools / "nvidia-smi"
        if driver is None:
            # Whatever the machine has that runs the test: here there is no card.
            smi.write_text("#!/bin/sh\nexit 9\n", encoding="ascii")
            smi.chmod(0o755)
        else:
            state = folder / "gpu" / "state.json"
            self.environment["GPU_SIMULATOR_STATE"] = str(state)
            smi.write_text(SMI, encoding="utf-8")
            smi.chmod(0o755)
            gpu_simulator.control(["--state", str(state), "install", "--profile", profile, "--driver", driver])
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def switch(self, **switches: Any) -> None:
        """Set exactly these faults."""
        fresh = self._switches.with_suffix(".new")
        fresh.write_text(json.dumps(switches), encoding="utf-8")
        fresh.replace(self._switches)

    def start(self, *, wait: bool = True) -> Standin:
        # Port 0 is a free one; which one it is, the log tells.
        environment = {"OLLAMA_HOST": "127.0.0.1:0", **self.environment}
        if self.url:
            environment["OLLAMA_HOST"] = self.url.removeprefix("http://")
        Path(environment["HOME"]).mkdir(exist_ok=True)
        before = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(self.program), "serve"], env=environment, stdout=out, stderr=out
            )
        deadline = time.monotonic() + START_TIMEOUT
        while wait:
            for line in self._log.read_text(encoding="utf-8")[before:].splitlines():
                if "Listening on " in line:
                    self.url = "http://" + line.partition("Listening on ")[2].split()[0]
                    self.environment["OLLAMA_HOST"] = self.url
                    if self._answers():
                        return self
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the stand-in did not start:\n{self.log()}")
            time.sleep(0.02)
        return self

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/version", timeout=START_TIMEOUT) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it; returns the exit status."""
        assert self.process is not None, "it was started"
        self.process.send_signal(how)
        return self.process.wait(timeout=START_TIMEOUT)

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8") if self._log.exists() else ""

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """``ollama WORDS``."""
        return subprocess.run(
            [sys.executable, str(self.program), *words],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def smi(self, *words: str) -> str:
        """What nvidia-smi of this machine prints."""
        smi = [str(self.folder / "tools" / "nvidia-smi"), *words]
        return subprocess.run(smi, env=self.environment, capture_output=True, text=True, check=True).stdout

    def blob(self, digest: str) -> Path:
        return self.store / "blobs" / f"sha256-{digest.removeprefix('sha256:')}"

    def __enter__(self) -> Standin:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
