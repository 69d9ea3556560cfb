#!/bin/sh
# Debian's syslog-ng for the tests, beside rsyslog, with which its package conflicts: unpacked into a folder.
#   tests/support/syslog_ng.sh FOLDER && export PATH="FOLDER:$PATH"
# It needs libivykis0, libnet1, libpcre3, librdkafka1 and libwrap0, which conflict with nothing.
set -eu
mkdir -p "$1/unpacked"
folder=$(cd "$1" && pwd)
cd "$folder/unpacked"
apt-get download syslog-ng-core syslog-ng-mod-http syslog-ng-mod-rdkafka
for package in *.deb; do dpkg -x "$package" .; done
cat > "$folder/syslog-ng" <<EOF
#!/bin/sh
export LD_LIBRARY_PATH="$folder/unpacked/usr/lib/syslog-ng"
exec "$folder/unpacked/usr/sbin/syslog-ng" --module-path="$(echo "$folder"/unpacked/usr/lib/syslog-ng/3.*)" "\$@"
EOF
chmod +x "$folder/syslog-ng"
