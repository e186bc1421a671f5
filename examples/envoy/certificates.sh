#!/bin/sh
# Makes certificates to try the example with, in ./certs or the folder named: an authority, the gateway's, alice's and bob's.
set -eu
cd "$(dirname "$0")"
folder=${1:-certs}
mkdir -p "$folder"
cd "$folder"

key() {
    openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"
}

key ca
openssl req -x509 -new -key ca.key -subj "/CN=example authority" -days 30 -out ca.pem

# A person is named by the URI; the CN is for gateways that read it. No certificate names both a server and a person.
certificate() {
    key "$1"
    openssl req -new -key "$1.key" -subj "/CN=$1" |
        openssl x509 -req -CA ca.pem -CAkey ca.key -set_serial "0x$(openssl rand -hex 16)" -days 30 -out "$1.pem" \
            -extfile "$1.names" 2>/dev/null
    rm "$1.names"
}

echo "subjectAltName = DNS:localhost, IP:127.0.0.1, IP:::1" >server.names
certificate server
for person in alice bob; do
    echo "subjectAltName = URI:spiffe://example.org/$person" >"$person.names"
    certificate "$person"
done
