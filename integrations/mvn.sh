#!/bin/sh
# Runs Maven in this folder, with Debian's own packages unpacked into .tools/debian where this machine lacks it or
# a compiler.
set -eu

root="$(cd "$(dirname "$0")/.." && pwd)"

if command -v mvn >/dev/null && command -v javac >/dev/null; then
    exec mvn "$@"
fi

unpacked="$root/.tools/debian/root"
jdk="$unpacked/usr/lib/jvm/java-17-openjdk-$(dpkg --print-architecture)"
maven="$unpacked/usr/share/maven"
if [ ! -x "$jdk/bin/javac" ] || [ ! -d "$maven/boot" ]; then
    "$root/tests/tools.sh" openjdk-17-jre-headless openjdk-17-jdk-headless maven
fi
# Its files of settings are links into the system's /etc, where nothing was installed.
find "$jdk" -type l -lname '/etc/*' | while read -r link; do
    ln -sf "$unpacked$(readlink "$link")" "$link"
done
# Likewise the authorities to trust, which Debian's package would have written when it was set up.
trusted="$root/.tools/debian/trusted.jks"
[ -e "$trusted" ] || python3 "$root/tests/key_store.py" "$trusted"

# shellcheck disable=SC2046
exec "$jdk/bin/java" $(tr '\n' ' ' <.mvn/jvm.config) \
    -Djavax.net.ssl.trustStore="$trusted" -Djavax.net.ssl.trustStorePassword=changeit \
    -Dclassworlds.conf="$unpacked/etc/maven/m2.conf" -Dmaven.home="$maven" -Dmaven.conf="$unpacked/etc/maven" \
    -Dmaven.multiModuleProjectDirectory="$PWD" \
    -cp "$maven/boot/plexus-classworlds-2.x.jar" org.codehaus.plexus.classworlds.launcher.Launcher "$@"
