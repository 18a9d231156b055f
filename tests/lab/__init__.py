# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The lab: machines with systemd, apt and SSH, made on this host for the demo, for molecule and for the tests.

From a shell: ``python -m tests.lab --help``. From Python::

    from tests.lab.lab import Lab

    machines = Lab("e2e").up(count=1, gpus="v100x4").machines
    print(machines[0].name, machines[0].address)

docs/lab.md describes how it works.
"""
