#!/bin/bash
# Builds the package of the login agent for Debian and Ubuntu guests. It needs no root.
#
#   deploy/guest-package/build.sh VERSION OUT.deb
set -euo pipefail

version=${1:?usage: build.sh VERSION OUT.deb}
out=${2:?usage: build.sh VERSION OUT.deb}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
install -D -m 755 "$here/vmop-agent" "$work/usr/sbin/vmop-agent"
install -D -m 755 "$here/session" "$work/usr/lib/vmop-agent/session"
install -D -m 644 "$here/vmop-agent.service" "$work/lib/systemd/system/vmop-agent.service"
install -D -m 644 "$here/90-vmop-agent.rules" "$work/lib/udev/rules.d/90-vmop-agent.rules"
install -D -m 644 "$here/../../LICENSE" "$work/usr/share/doc/vmop-agent/copyright"
mkdir "$work/DEBIAN"
cat >"$work/DEBIAN/control" <<END
Package: vmop-agent
Version: $version
Architecture: all
Maintainer: vm-operator
Depends: bash, systemd
Section: admin
Priority: optional
Description: login agent of vm-operator
 Logs a user in to the desktop of a guest, and out, when the VM's field
 spec.vm.display.loggedInUser asks for it.
END
# The port has events for udev only when it appears, so a guest that runs has to be told.
cat >"$work/DEBIAN/postinst" <<'END'
#!/bin/sh
set -e
if [ "$1" = configure ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload
	udevadm control --reload || true
	udevadm trigger --subsystem-match=virtio-ports || true
fi
END
cat >"$work/DEBIAN/prerm" <<'END'
#!/bin/sh
set -e
if [ -d /run/systemd/system ]; then
	systemctl stop vmop-agent.service || true
fi
END
chmod 755 "$work/DEBIAN/postinst" "$work/DEBIAN/prerm"
# The same source gives the same package.
export SOURCE_DATE_EPOCH=0
find "$work" -exec touch --no-dereference --date=@0 {} +
mkdir -p "$(dirname "$out")"
dpkg-deb --root-owner-group -Zxz --build "$work" "$out" >/dev/null
