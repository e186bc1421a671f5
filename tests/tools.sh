#!/bin/sh
# Unpacks the Debian programs that the tests need into .tools/debian: nothing is installed, no system service
# is started, and root is not needed. `tests.tools.need` finds them there. With arguments: those packages alone.
set -eu

packages="${*:-redis-server nginx caddy prometheus pgbouncer openssl chromium fonts-dejavu-core}"

cd "$(dirname "$0")/.."
home="$PWD/.tools/debian"
mkdir -p "$home/lists/partial" "$home/cache/archives/partial" "$home/bin"

if ! command -v apt-get >/dev/null; then
    echo "no apt-get here, so these are left out: $packages" >&2
    exit 1
fi

# Lists and cache of our own, so that the system's stay as they are. Only what this machine lacks is fetched.
private() {
    apt-get -qq -o Dir::State::Lists="$home/lists" -o Dir::Cache="$home/cache" -o Debug::NoLocking=1 \
        -o APT::Sandbox::User=root -o Acquire::Retries=2 "$@"
}
echo "fetching $packages into .tools/debian"
private update
# shellcheck disable=SC2086
private install --yes --no-install-recommends --download-only $packages
for archive in "$home"/cache/archives/*.deb; do
    [ -e "$archive" ] && dpkg-deb -x "$archive" "$home/root"
done
rm -rf "$home/lists" "$home/cache"

# An unpacked program looks for its libraries in the system; a wrapper shows it ours.
libraries=$(find "$home/root" -name '*.so*' -exec dirname {} + 2>/dev/null | sort -u | paste -sd: -)
# Chromium's own wrapper knows the system's places alone, so the last of the two of this name is the program.
find "$home/root/usr/bin" "$home/root/usr/sbin" "$home/root/usr/lib/chromium/chromium" -type f -o -type l 2>/dev/null | while read -r program; do
    wrapper="$home/bin/$(basename "$program")"
    printf '#!/bin/sh\nLD_LIBRARY_PATH="%s" exec "%s" "$@"\n' "$libraries" "$program" >"$wrapper"
    chmod +x "$wrapper"
done
# And a browser without fonts shows nothing.
cat >"$home/fonts.conf" <<FONTS
<fontconfig><dir>$home/root/usr/share/fonts</dir><dir>/usr/share/fonts</dir><cachedir>$home/fonts</cachedir></fontconfig>
FONTS
[ $# -gt 0 ] || touch "$home/.done"
