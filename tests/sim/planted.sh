#!/bin/sh
# Plants each bug of tests/sim/planted in a copy of the working tree, one after the other, and runs the simulation there, which must find it. It prints
# which run has found it, and after how many seconds (without the compiler's). A name as an argument: only that one. PROFILE=dev compiles sooner,
# and then runs slower. By hand: git apply tests/sim/planted/NAME.patch
# In tests/sim/planted/open are bugs that it has not found yet: open/NAME as an argument.
set -eu
cd "$(dirname "$0")/../.."
root=$PWD
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$root/target}" CARGO_INCREMENTAL=1 RUST_BACKTRACE=0
copy=$CARGO_TARGET_DIR/planted
logs=$CARGO_TARGET_DIR/planted-logs
profile=${PROFILE:-sim}
seeds=${SIM_SEEDS:-1500}

# The copy stays, so that the compiler has to do only what a bug changes. One that was left with a bug in it is made anew.
if [ -e "$copy/planted-now" ]; then rm -rf "$copy"; fi
mkdir -p "$copy" "$logs"
git ls-files -z --cached --others --exclude-standard | tar --null -T - -c |
    tar -x -m --keep-newer-files --warning=no-ignore-newer -C "$copy"

run() { (cd "$copy" && cargo test --profile "$profile" --no-default-features --features manager,vmctl --test sim "$@"); }
# Runs it until a promise breaks, with the log $1: a few random scenarios, those with faults at some requests, and then many random ones.
find_it() {
    SIM_FIRST=0 SIM_SEEDS=60 run random_scenarios >"$1" 2>&1 &&
        SIM_STRIDE="${SIM_STRIDE:-29}" run a_fault_at_every_request >"$1" 2>&1 &&
        SIM_FIRST=60 SIM_SEEDS=$seeds run random_scenarios >"$1" 2>&1 && return 1
    grep -q '^found by' "$1"
}

# Without a bug nothing may fail, or each bug would seem to be found.
if ! SIM_FIRST=0 SIM_SEEDS=60 run random_scenarios >"$logs/none.log" 2>&1 ||
    ! SIM_STRIDE="${SIM_STRIDE:-29}" run a_fault_at_every_request >"$logs/none.log" 2>&1; then
    echo "The simulation fails without a bug, see $logs/none.log"
    exit 1
fi

missed=0
for patch in tests/sim/planted/${1:-*}.patch; do
    name=$(basename "$patch" .patch)
    log=$logs/$name.log
    touch "$copy/planted-now"
    (cd "$copy" && patch -s -p1 <"$root/$patch")
    if ! run --no-run 2>"$log" || grep -q '^warning: unused\|^warning: unreachable' "$log"; then
        echo "$name: does not compile without warnings, see $log"
        missed=1
    else
        began=$(date +%s)
        if find_it "$log"; then
            echo "$name: $(grep -m 1 '^found by' "$log"), after $(($(date +%s) - began)) s"
        else
            echo "$name: MISSED"
            missed=1
        fi
    fi
    (cd "$copy" && patch -s -R -p1 <"$root/$patch")
    rm "$copy/planted-now"
done
exit $missed
