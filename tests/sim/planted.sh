#!/bin/sh
# Plants each bug of tests/sim/planted in a copy of the working tree, and runs the simulation there, which must find it. A name as an argument:
# only that one. PROFILE=dev compiles sooner, and then runs slower. By hand: git apply tests/sim/planted/NAME.patch
# In tests/sim/planted/open are bugs that it has not found yet, or that were not tried: open/NAME as an argument.
set -eu
cd "$(dirname "$0")/../.."
root=$PWD
copy=$root/target/planted
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$root/target}" CARGO_INCREMENTAL=1 RUST_BACKTRACE=0 SIM_SEEDS="${SIM_SEEDS:-1500}"
profile=${PROFILE:-sim}
missed=0
for patch in tests/sim/planted/${1:-*}.patch; do
    name=$(basename "$patch" .patch)
    rm -rf "$copy"
    mkdir -p "$copy"
    git ls-files -z --cached --others --exclude-standard | tar --null -T - -c | tar -x -m -C "$copy"
    (cd "$copy" && patch -s -p1 <"$root/$patch")
    log=$root/target/planted-$name.log
    run() { (cd "$copy" && cargo test --profile $profile --no-default-features --features manager --test sim "$@"); }
    if ! run --no-run 2>"$log"; then
        echo "$name: does not compile, see $log"
        missed=1
    elif run -- --nocapture >"$log" 2>&1; then
        echo "$name: MISSED"
        missed=1
    else
        echo "$name: found: $(grep -m 1 -B 1 -E '^seed|RUST_BACKTRACE' "$log" | head -1 | cut -c 1-160)"
    fi
done
rm -rf "$copy"
exit $missed
