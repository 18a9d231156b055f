// SPDX-License-Identifier: GPL-3.0-or-later
// One of the parts of the driver that are loaded beside nvidia.ko.
#include <linux/module.h>
int nvidia_lab_part(void);
static int __init begin(void) { return nvidia_lab_part(); }
static void __exit end(void) { }
module_init(begin);
module_exit(end);
MODULE_LICENSE("NVIDIA");
MODULE_VERSION(LAB_VERSION);
