#!/bin/sh
# Install what `make test-all` needs and pip does not have: a browser with its driver, node, and the packages of an AI SDK for node.
#
#     tools/test_tools.sh VENV
#
# Debian packages are installed where apt and the right to use it are there. What is missing afterwards is named, and the exit status is 1.
set -eu
venv=$1

have() { command -v "$1" >/dev/null 2>&1; }
browser() { have chromium || have chromium-browser || have google-chrome; }

wanted=
browser || wanted="$wanted chromium"
have chromedriver || wanted="$wanted chromium-driver"
have npm || wanted="$wanted nodejs npm"
if [ -n "$wanted" ] && have apt-get && [ "$(id -u)" = 0 ]; then
    apt-get update -q
    # shellcheck disable=SC2086  # a list of words
    apt-get install -q -y --no-install-recommends $wanted
fi

missing=
browser || missing="$missing, a Chromium (Debian: chromium)"
have chromedriver || missing="$missing, its driver (Debian: chromium-driver)"
have npm || missing="$missing, node with npm (Debian: nodejs npm)"
if [ -n "$missing" ]; then
    echo "make test-all needs what is not here:${missing#,}; install it, or run this as root where there is apt" >&2
    exit 1
fi
# Each package in the version and with the hash of the lock file; none may run anything while it is installed. To change a version:
#     npm install --package-lock-only --omit-lockfile-registry-resolved --prefix tools/ai-sdk PACKAGE@VERSION
cp "$(dirname "$0")"/ai-sdk/package.json "$(dirname "$0")"/ai-sdk/package-lock.json "$venv"
npm ci --ignore-scripts --no-audit --no-fund --prefix "$venv"
