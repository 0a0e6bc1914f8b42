#!/usr/bin/env bash
# Run the test suite as it runs on other people's machines:
#
#   scripts/test_elsewhere.sh [default|avx2|german ...]     all of them without an argument
#
# A clone of what is committed is put into a new folder whose name has a space, installed from nothing,
# and given to a user who is not root (where this one is). There the tests run without a terminal, in
# the background, where SIGINT is ignored, and
#
#   default   with torch's and oneDNN's code for any processor, one thread, the C locale, far in the east
#   avx2      with their code for AVX2, started by nohup, far in the west
#   german    in a locale whose letters are not UTF-8, where the machine can make one
#
# The logs stay in the folder, whose name is printed first. Exits with 1 where a test has failed.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
wanted=("$@")
[ $# -gt 0 ] || wanted=(default avx2 german)
work="$(mktemp -d)/another folder"
mkdir -p "$work/home"
echo "in $work"
git clone --quiet "$here" "$work/clone"

as_user=()
if [ "$(id -u)" -eq 0 ] && command -v setpriv > /dev/null; then
    chmod 755 "$(dirname "$work")"
    chown -R 65534:65534 "$work"
    as_user=(setpriv --reuid=65534 --regid=65534 --clear-groups)
fi
unprivileged() { (cd "$work/clone" && "${as_user[@]}" env HOME="$work/home" "$@"); }

unprivileged make install > "$work/install.log" 2>&1 || { cat "$work/install.log" >&2; exit 1; }

# The environment of a variation, a word each; nothing where it cannot be had here.
variables() {
    case $1 in
        default) echo ATEN_CPU_CAPABILITY=default DNNL_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=1 \
            LC_ALL=C TZ=Pacific/Kiritimati ;;
        avx2) echo ATEN_CPU_CAPABILITY=avx2 DNNL_MAX_CPU_ISA=AVX2 TZ=America/Adak ;;
        german)
            local locales="$work/../locales"
            mkdir -p "$locales"
            localedef -i de_DE -f ISO-8859-1 "$locales/de_DE.ISO-8859-1" 2> /dev/null || return 0
            chmod -R a+rX "$locales"
            echo "LOCPATH=$(realpath "$locales") LC_ALL=de_DE.ISO-8859-1 PYTHONUTF8=0" ;;
        *) echo "There is no variation $1; there are default, avx2, german." >&2; return 2 ;;
    esac
}

status=0
for name in "${wanted[@]}"; do
    read -ra given <<< "$(variables "$name")"
    if [ ${#given[@]} -eq 0 ]; then
        echo "$name: left out, it cannot be made here"
        continue
    fi
    # `&` in a shell without job control leaves the child with SIGINT ignored, as a user's `&` does.
    setsid nohup bash -c '"$@"' run "${as_user[@]}" env -C "$work/clone" HOME="$work/home" \
        "${given[@]}" make unit > "$work/$name.log" 2>&1 < /dev/null &
    if wait $!; then result=passed; else result=FAILED status=1; fi
    echo "$name: $result: $(grep -E '^(=+ )?[0-9]+ (passed|failed)' "$work/$name.log" | tail -n 1)"
done
exit $status
