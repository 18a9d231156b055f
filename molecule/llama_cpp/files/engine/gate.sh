#!/bin/sh
while [ -e /var/tmp/gate ]; do sleep 0.2; done
