#!/bin/bash
# Builds the package of kubectl-vm for Debian and Ubuntu: the program, TAB completion and manual pages. It needs no root. The program must
# run on this computer, because it writes its completion and manual pages itself.
#
#   deploy/kubectl-package/build.sh VERSION PROGRAM OUT.deb
set -euo pipefail

usage="usage: build.sh VERSION PROGRAM OUT.deb"
version=${1:?$usage}
program=${2:?$usage}
out=${3:?$usage}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
install -D -m 755 "$program" "$work/usr/bin/kubectl-vm"
# kubectl runs this name to complete what stands behind `kubectl vm`.
ln -s kubectl-vm "$work/usr/bin/kubectl_complete-vm"
share=$work/usr/share
mkdir -p "$share"/{bash-completion/completions,zsh/vendor-completions,fish/vendor_completions.d,man/man1}
"$work/usr/bin/kubectl-vm" completion bash >"$share/bash-completion/completions/kubectl-vm"
"$work/usr/bin/kubectl-vm" completion zsh >"$share/zsh/vendor-completions/_kubectl-vm"
"$work/usr/bin/kubectl-vm" completion fish >"$share/fish/vendor_completions.d/kubectl-vm.fish"
"$work/usr/bin/kubectl-vm" man --out "$share/man/man1"
find "$share/man" -type f -exec gzip -9 -n {} +
install -D -m 644 "$here/../../LICENSE" "$share/doc/kubectl-vm/copyright"
size=$(du -sk "$work" | cut -f 1)
mkdir "$work/DEBIAN"
# For Debian 1.0.0-rc.1 is later than 1.0.0, and 1.0.0~rc.1 is not.
cat >"$work/DEBIAN/control" <<END
Package: kubectl-vm
Version: $(printf %s "$version" | sed 's/-/~/')
Architecture: amd64
Maintainer: vm-operator
Installed-Size: $size
Suggests: kubectl, openssh-client
Section: admin
Priority: optional
Description: kubectl vm, the command of vm-operator
 Lists, starts, stops and explains the virtual machines that vm-operator runs
 in Kubernetes, and shows, checks and tests the templates of their objects.
END
# The same program gives the same package.
export SOURCE_DATE_EPOCH=0
find "$work" -exec touch --no-dereference --date=@0 {} +
mkdir -p "$(dirname "$out")"
dpkg-deb --root-owner-group -Zxz --build "$work" "$out" >/dev/null
