# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a PCI device id or a product name tells: product, compute capability, number of NVLinks.

Sources: names and ids from the pci.ids database (Debian package pci.ids, 2023-04-11) and, for newer parts, from
nvidia-smi outputs in public (H200 10de:2335 also measured); compute capabilities from NVIDIA's CUDA GPU list; NVLink
counts from the products' data sheets. An id that is not listed still gets its compute capability from the block of
ids that its chip family uses; null where even that is unknown.
"""

from __future__ import annotations

import re

#: Device id (vendor 10de) -> product, as the driver names it where we know that.
PRODUCTS: dict[str, str] = {
    # Pascal
    "15f0": "Quadro GP100",
    "15f7": "Tesla P100-PCIE-12GB",
    "15f8": "Tesla P100-PCIE-16GB",
    "15f9": "Tesla P100-SXM2-16GB",
    "1b38": "Tesla P40",
    "1bb3": "Tesla P4",
    "1bb4": "Tesla P6",
    # Volta
    "1d81": "NVIDIA TITAN V",
    "1db1": "Tesla V100-SXM2-16GB",
    "1db2": "Tesla V100-DGXS-16GB",
    "1db3": "Tesla V100-FHHL-16GB",
    "1db4": "Tesla V100-PCIE-16GB",
    "1db5": "Tesla V100-SXM2-32GB",
    "1db6": "Tesla V100-PCIE-32GB",
    "1db7": "Tesla V100-DGXS-32GB",
    "1db8": "Tesla V100-SXM3-32GB",
    "1dba": "Quadro GV100",
    "1dbe": "GV100 Engineering Sample",
    "1df0": "Tesla PG500-216",
    "1df2": "Tesla PG503-216",
    "1df5": "Tesla V100-SXM2-16GB",
    "1df6": "Tesla V100S-PCIE-32GB",
    # Turing
    "1e30": "Quadro RTX 6000/8000",
    "1e37": "Tesla T10",
    "1e38": "Tesla T40",
    "1eb8": "Tesla T4",
    # Ampere
    "20b0": "NVIDIA A100-SXM4-40GB",
    "20b1": "NVIDIA A100-PCIE-40GB",
    "20b2": "NVIDIA A100-SXM4-80GB",
    "20b3": "NVIDIA A100-SXM-64GB",
    "20b5": "NVIDIA A100 80GB PCIe",
    "20b7": "NVIDIA A30",
    "20b8": "NVIDIA A100X",
    "20b9": "NVIDIA A30X",
    "20f1": "NVIDIA A100-PCIE-40GB",
    "20f3": "NVIDIA A800-SXM4-80GB",
    "20f5": "NVIDIA A800 80GB PCIe",
    "20f6": "NVIDIA A800 40GB PCIe",
    "2204": "NVIDIA GeForce RTX 3090",
    "2230": "NVIDIA RTX A6000",
    "2231": "NVIDIA RTX A5000",
    "2235": "NVIDIA A40",
    "2236": "NVIDIA A10",
    "2237": "NVIDIA A10G",
    "25b6": "NVIDIA A2 / A16",
    # Ada
    "2684": "NVIDIA GeForce RTX 4090",
    "26b1": "NVIDIA RTX 6000 Ada Generation",
    "26b5": "NVIDIA L40",
    "26b9": "NVIDIA L40S",
    "27b8": "NVIDIA L4",
    # Hopper
    "2321": "NVIDIA H100 NVL",
    "2322": "NVIDIA H800 PCIe",
    "2324": "NVIDIA H800",
    "2329": "NVIDIA H20",
    "2330": "NVIDIA H100 80GB HBM3",
    "2331": "NVIDIA H100 PCIe",
    "2335": "NVIDIA H200",
    "233b": "NVIDIA H200 NVL",
    "2342": "NVIDIA GH200 480GB",
    # Blackwell
    "2901": "NVIDIA B200",
    "2941": "NVIDIA GB200",
    "2b85": "NVIDIA GeForce RTX 5090",
    "2bb1": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "2bb5": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
}

#: Blocks of device ids by chip, first and last id, compute capability.
_CHIP_BLOCKS: tuple[tuple[int, int, str], ...] = (
    (0x1580, 0x15FF, "6.0"),  # GP100
    (0x1B00, 0x1D7F, "6.1"),  # GP102 to GP108
    (0x1D80, 0x1DFF, "7.0"),  # GV100
    (0x1E00, 0x1FFF, "7.5"),  # TU102 to TU106
    (0x2080, 0x20FF, "8.0"),  # GA100
    (0x2180, 0x21FF, "7.5"),  # TU116
    (0x2200, 0x22FF, "8.6"),  # GA102
    (0x2300, 0x237F, "9.0"),  # GH100
    (0x2400, 0x25FF, "8.6"),  # GA103 to GA107
    (0x2680, 0x28FF, "8.9"),  # AD102 to AD107
    (0x2900, 0x297F, "10.0"),  # GB100
    (0x2B80, 0x2DFF, "12.0"),  # GB202 to GB207
)

#: NVLinks that the board itself carries, by product name. A bridge card (PCIe) is left out: how many of its links are
#: in use depends on the bridges fitted. First match counts.
_NVLINKS: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"P100-SXM2", re.IGNORECASE), 4),
    (re.compile(r"V100-SXM[23]", re.IGNORECASE), 6),
    (re.compile(r"A800-SXM4", re.IGNORECASE), 8),
    (re.compile(r"A100-SXM", re.IGNORECASE), 12),
    (re.compile(r"H800(?!.*(?:PCIe|NVL))", re.IGNORECASE), 8),
    (re.compile(r"(?<!G)H(?:100|200|20)\b(?!.*(?:PCIe|NVL))", re.IGNORECASE), 18),
    (re.compile(r"\bG?B(?:100|200|300)\b", re.IGNORECASE), 18),
)

#: Cards whose NVLinks lead through bridges, which may or may not be fitted.
_BRIDGE_CARDS = re.compile(
    r"PCI-?E|\bNVL\b|\b(?:Quadro|TITAN|GeForce|RTX|GP100|GV100)\b|\bA(?:10|16|30|40|[456]000|5500|4500)X?\b",
    re.IGNORECASE,
)


def device_id(pci_id: str | None) -> str | None:
    """The four digits of an NVIDIA device id from any of its forms, or null.

    Forms: ``10de:1db5``, ``0x1DB510DE`` (nvidia-smi), ``0x1db5`` (sysfs), ``1db5``.
    """
    if not pci_id:
        return None
    text = pci_id.strip().lower().removeprefix("0x")
    if match := re.fullmatch(r"10de:(?:0x)?([0-9a-f]{4})", text):
        return match.group(1)
    if match := re.fullmatch(r"([0-9a-f]{4})10de", text):
        return match.group(1)
    return text if re.fullmatch(r"[0-9a-f]{4}", text) else None


def product_of(pci_id: str | None) -> str | None:
    """Product name of a PCI id, or null where the table does not have it."""
    return PRODUCTS.get(device_id(pci_id) or "")


def compute_capability_of(pci_id: str | None) -> str | None:
    """Compute capability (``7.0``) of a PCI id, or null where its chip is unknown."""
    found = device_id(pci_id)
    if found is None:
        return None
    value = int(found, 16)
    return next((capability for first, last, capability in _CHIP_BLOCKS if first <= value <= last), None)


def nvlinks_of(product: str | None) -> int | None:
    """NVLinks of an SXM board by product name, or null where the name does not decide it."""
    if not product:
        return None
    return next((links for pattern, links in _NVLINKS if pattern.search(product)), None)


def has_bridges(product: str | None) -> bool:
    """Whether a card's NVLinks lead through bridges, so that cards of one kind can have different numbers of them."""
    return bool(product and _BRIDGE_CARDS.search(product))
