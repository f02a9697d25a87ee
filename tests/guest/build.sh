#!/bin/bash
# Builds the disk image of the tiny guest: Debian's cloud kernel, busybox, QEMU's guest agent and an ssh server. It boots with UEFI and BIOS.
#
#   tests/guest/build.sh OUT.img
#
# The script installs and mounts nothing, so any user with apt can run it: it downloads Debian packages and unpacks them into a
# temporary directory. OUT.img.sum contains a hash of the inputs. If they have not changed, the script does nothing.
set -euo pipefail

out=${1:?usage: build.sh OUT.img}
mkdir -p "$(dirname "$out")"
target=$(cd "$(dirname "$out")" && pwd)/$(basename "$out")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
for tool in apt-get:apt busybox:busybox-static cpio:cpio grub-mkimage:grub-common mformat:mtools mcopy:mtools zstd:zstd; do
	command -v "${tool%:*}" >/dev/null || { echo "build.sh: ${tool%:*} is missing: apt-get install ${tool#*:}" >&2; exit 1; }
done

kernel=${GUEST_KERNEL_PACKAGE:-$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9]\)/\1/p' | head -n 1)}
[ -n "$kernel" ] || { echo "build.sh: apt knows no linux-image-cloud-amd64: run apt-get update, or set GUEST_KERNEL_PACKAGE" >&2; exit 1; }
# The packages that the guest agent needs at run time. Of all its dependencies only the libraries are needed.
packages=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances \
	qemu-guest-agent | grep -E '^(qemu-guest-agent|lib[a-z0-9.+-]*[0-9][a-z0-9]*)$' | grep -vE 'perl|gdbm|^libdb|-s1$|acl|crypt|^libmd|bz2|lzma' | sort -u)
packages="$packages $kernel busybox-static syslinux syslinux-common grub-efi-amd64-bin"
# The ssh server, with its libraries, and what scp asks for.
packages="$packages dropbear-bin libtomcrypt1 libtommath1 libgmp10 libcrypt1 zlib1g openssh-sftp-server"
# shellcheck disable=SC2086
sum=$({ cat "$here/build.sh" "$here/init" "$here/grub.cfg"; apt-cache policy $packages | grep -E '^[^ ]|Candidate'; } | sha256sum)
if [ -f "$out" ] && [ "$(cat "$out.sum" 2>/dev/null)" = "$sum" ]; then
	exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/deb" "$work/all" "$work/root"
cd "$work/deb"
# shellcheck disable=SC2086
apt-get -qq -o APT::Sandbox::User=root download $packages >&2
for deb in *.deb; do dpkg-deb -x "$deb" "$work/all"; done
cd "$work"

version=$(ls all/lib/modules)
busybox depmod -b "$work/all" "$version"
root=$work/root
mkdir -p "$root"/{bin,sbin,usr/sbin,usr/bin,etc,lib/modules/"$version"}
cp "$(find all -path "*bin/busybox" -type f)" "$root/bin/busybox"
install -m 755 "$here/init" "$root/init"

# The modules with their dependencies. A module that does not exist is built in.
modules=$work/all/lib/modules/$version
for name in virtio_pci virtio_blk virtio_console virtio_net virtio_balloon virtio-rng button evdev vfat nls_cp437 nls_iso8859-1 \
	nls_ascii nls_utf8 ahci virtio_scsi sr_mod isofs pvpanic-mmio; do
	sed -n "s|^\([^:]*/$name\.ko[^:]*\): *\(.*\)|\1 \2|p" "$modules/modules.dep"
done | tr ' ' '\n' | sort -u | while read -r file; do
	[ -n "$file" ] || continue
	mkdir -p "$root/lib/modules/$version/$(dirname "$file")"
	cp "$modules/$file" "$root/lib/modules/$version/$file"
done
find "$root/lib/modules" -name '*.ko.xz' -exec busybox unxz {} +
cp "$modules"/modules.builtin "$modules"/modules.order "$root/lib/modules/$version/"
busybox depmod -b "$root" "$version"

# The guest agent and the ssh server, with the libraries that their loader finds.
loader=$(find all -name 'ld-linux-x86-64.so.2' | head -n 1)
libraries=$(find all -name '*.so*' -printf '%h\n' | sort -u | sed "s|^|$work/|" | paste -sd:)
mkdir -p "$root/lib64" "$root/lib/x86_64-linux-gnu" "$root/usr/lib"
cp -L "$loader" "$root/lib64/ld-linux-x86-64.so.2"
for program in "$(find all -name qemu-ga -type f)" all/usr/sbin/dropbear all/usr/bin/dropbearkey all/usr/lib/openssh/sftp-server; do
	case $program in
	*/sftp-server) cp "$program" "$root/usr/lib/" ;; # where dropbear looks
	*) cp "$program" "$root/usr/sbin/" ;;
	esac
	"$work/$loader" --library-path "$libraries" --list "$program" | sed -n 's|.* => \(/[^ ]*\) .*|\1|p' | while read -r library; do
		cp -L "$library" "$root/lib/x86_64-linux-gnu/"
	done
done
cat >"$root/etc/os-release" <<END
ID=tiny-guest
NAME="Tiny guest"
PRETTY_NAME="Tiny guest (${kernel#linux-image-})"
VERSION_ID=1
END

(cd "$root" && find . | LC_ALL=C sort | cpio --quiet -o -H newc -R 0:0) | zstd -q -19 -T0 >initrd

# The disk: a partition table (written by hand), an EFI system partition with the boot loaders SYSLINUX (for BIOS) and GRUB (for UEFI), and a small raw
# partition in which the guest counts its starts. GRUB for BIOS moves the kernel byte by byte, which takes an emulated CPU three seconds.
# The kernel's options in grub.cfg, which SYSLINUX gets, too, make its timer periodic: under QEMU's own emulation a CPU can lose the one shot for which
# it sleeps, and then it sleeps forever. The others save an eighth of the kernel's time: it has nothing to protect.
options=$(sed -n 's|^linux /vmlinuz ||p' "$here/grub.cfg")
printf 'DEFAULT linux\nLABEL linux\nKERNEL /vmlinuz\nINITRD /initrd\nAPPEND %s\n' "$options" >syslinux.cfg
grub-mkimage -d all/usr/lib/grub/x86_64-efi -O x86_64-efi -p /grub -c "$here/grub.cfg" -o bootx64.efi part_msdos fat search_fs_file linux
syslinux=all/usr/lib/syslinux
esp_start=2048
bytes=$(cat "all/boot/vmlinuz-$version" initrd bootx64.efi | wc -c)
esp_sectors=$(((bytes / 512 + bytes / 512 / 50 + 4096 + 2047) / 2048 * 2048))
raw_start=$((esp_start + esp_sectors))
raw_sectors=2048
truncate -s $(((raw_start + raw_sectors) * 512)) disk.img
number() { # four bytes, little endian
	printf '\\x%02x\\x%02x\\x%02x\\x%02x' $(($1 & 255)) $(($1 >> 8 & 255)) $(($1 >> 16 & 255)) $(($1 >> 24 & 255))
}
entry() { # arguments: status type start sectors. The CHS fields have their maximum, so only LBA counts
	printf "\\x$1\\xfe\\xff\\xff\\x$2\\xfe\\xff\\xff$(number "$3")$(number "$4")"
}
write() { dd of=disk.img conv=notrunc bs=1 seek="$1" status=none; }
head -c 440 $syslinux/mbr/mbr.bin | write 0
{ entry 80 ef $esp_start $esp_sectors; entry 00 da $raw_start $raw_sectors; } | write 446
printf '\x55\xaa' | write 510
esp=disk.img@@$((esp_start * 512))
mformat -i "$esp" -T $esp_sectors -h 255 -s 63 -v ESP ::
mmd -i "$esp" ::/EFI ::/EFI/BOOT
mcopy -i "$esp" bootx64.efi ::/EFI/BOOT/BOOTX64.EFI
mcopy -i "$esp" "all/boot/vmlinuz-$version" ::/vmlinuz
mcopy -i "$esp" initrd ::/initrd
mcopy -i "$esp" syslinux.cfg $syslinux/modules/bios/ldlinux.c32 ::/
all/usr/bin/syslinux --offset $((esp_start * 512)) --install disk.img
# The last step is a rename, so that another process never reads an incomplete image.
cp --sparse=always disk.img "$target.new"
mv "$target.new" "$target"
printf '%s\n' "$sum" >"$target.sum"
echo "build.sh: $target: $(($(stat -c %s "$target") >> 20)) MiB" >&2
