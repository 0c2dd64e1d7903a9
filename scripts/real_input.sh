#!/bin/sh
# The main job on real input, judged by awk, sort and wc: exactly once, over kills and rivals.
# Usage: scripts/real_input.sh [idemlog binary]; prints PASS or FAIL lines, fails if one failed.
set -u

bin=${1:-}
if [ -z "$bin" ]; then
    cargo build --release --features cli --bin idemlog || exit 1
    bin=${CARGO_TARGET_DIR:-target}/release/idemlog
fi
bin=$(realpath "$bin")
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
failed=0

check() { # name, then a command that is true if all is well
    name=$1
    shift
    if "$@"; then echo "PASS $name"; else echo "FAIL $name"; failed=1; fi
}

now_ms() { echo $(($(date +%s%N) / 1000000)); }

cat /var/lib/dpkg/info/*.list > input 2> /dev/null
if ! [ -s input ]; then find /usr -xdev | awk '{ print; if (NR % 9 == 0) print $0 }' > input; fi
lines=$(wc -l < input)
awk '!seen[$0]++' input > expected
distinct=$(wc -l < expected)
echo "input: $lines lines, $distinct distinct"

# 1. Byte for byte what awk prints; the same input again prints nothing.
for order in emit-first mark-first; do
    start=$(now_ms)
    "$bin" filter --store "s-$order" --order $order < input > out
    check "$order prints what awk prints ($(($(now_ms) - start)) ms)" cmp -s out expected
    start=$(now_ms)
    "$bin" filter --store "s-$order" --order $order < input > out
    check "$order prints nothing again ($(($(now_ms) - start)) ms)" test ! -s out
done

# 2. Ten SIGKILLs on the way, then a run to the end. A line cut by a kill was not printed.
kills=10
batch=1000
for order in emit-first mark-first; do
    : > all
    kill_count=0
    while [ $kill_count -lt $kills ]; do
        "$bin" filter --store "k-$order" --order $order --batch $batch < input > out 2> err &
        pid=$!
        sleep "0.$(awk -v seed="$pid" 'BEGIN { srand(seed); printf "%02d", 5 + rand() * 30 }')"
        if kill -9 $pid 2> /dev/null; then kill_count=$((kill_count + 1)); fi
        wait $pid 2> /dev/null
        # Complete lines only: awk would add a newline to the last one.
        if [ -s out ] && [ -n "$(tail -c 1 out)" ]; then sed '$d' out; else cat out; fi >> all
        # A filter that got through before its kill: start over, so that every kill counts.
        if grep -q '^idemlog: lines=' err; then
            kill_count=$((kill_count - 1))
            batch=$((batch / 2 + 1))
        fi
    done
    "$bin" filter --store "k-$order" --order $order --batch $batch < input >> all
    sort all | uniq > printed
    sort expected > wanted
    repeats=$(($(wc -l < all) - $(wc -l < printed)))
    lost=$(comm -13 printed wanted | wc -l)
    alien=$(comm -23 printed wanted | wc -l)
    echo "$order, $kills kills, batch $batch: repeats=$repeats lost=$lost alien=$alien"
    check "$order printed nothing else" test "$alien" -eq 0
    if [ $order = emit-first ]; then
        check "emit-first lost nothing" test "$lost" -eq 0
        check "emit-first repeated at most a batch a kill" test "$repeats" -le $((kills * 1000))
    else
        check "mark-first repeated nothing" test "$repeats" -eq 0
        check "mark-first lost at most a batch a kill" test "$lost" -le $((kills * 1000))
    fi
done

# A random kill rarely hits the moment between print and commit, so one is made to: a batch larger
# than a pipe holds blocks while it is printed, because its reader stops after the first lines.
for order in emit-first mark-first; do
    mkfifo "pipe-$order"
    : > head
    { head -c 30000 > head; exec sleep 3; } < "pipe-$order" &
    reader=$!
    "$bin" filter --store "p-$order" --order $order --batch 5000 < input > "pipe-$order" 2> err &
    pid=$!
    while [ "$(wc -c < head 2> /dev/null || echo 0)" -lt 30000 ]; do sleep 0.05; done
    kill -9 $pid
    wait $pid 2> /dev/null
    kill $reader 2> /dev/null
    wait $reader 2> /dev/null
    sed '$d' head > before
    "$bin" filter --store "p-$order" --order $order --batch 5000 < input > after 2> err
    printed=$(wc -l < before)
    repeats=$(sort before after | uniq -d | wc -l)
    lost=$(sort -u before after | comm -13 - wanted | wc -l)
    echo "$order killed while printing: printed=$printed repeats=$repeats lost=$lost"
    if [ $order = emit-first ]; then
        check "emit-first printed the whole batch again" test "$repeats" -eq "$printed"
        check "emit-first lost nothing of it" test "$lost" -eq 0
        check "the kill hit the window" test "$repeats" -gt 0
    else
        check "mark-first repeated nothing of it" test "$repeats" -eq 0
        check "mark-first lost no more than the batch" test "$lost" -gt 0 -a "$lost" -le 5000
    fi
done

# Four filters at once over copies in another order share one store: each line once in all.
for order in emit-first mark-first; do
    pids=
    for number in 1 2 3 4; do
        shuf input > "copy-$number"
        "$bin" filter --store "f-$order" --order $order --batch 500 --lock-timeout 60s \
            < "copy-$number" > "four-$number" 2>> errors &
        pids="$pids $!"
    done
    failures=0
    for pid in $pids; do wait "$pid" || failures=$((failures + 1)); done
    check "four $order filters at once end well" test "$failures" -eq 0
    sort four-1 four-2 four-3 four-4 > printed
    check "four $order filters print each line once in all" cmp -s printed wanted
    echo "four $order filters: $(wc -l < four-1) $(wc -l < four-2) $(wc -l < four-3)" \
        "$(wc -l < four-4) lines"
done

# 3. Fifty processes at once under one key, some of them killed: never two lines.
: > ledger
for key in order-1 order-2 order-3; do
    pids=
    number=0
    while [ $number -lt 50 ]; do
        "$bin" run --store r --key $key --effects non-repeatable --lease 1s --lock-timeout 60s \
            -- sh -c "echo $key >> ledger" > /dev/null 2>> errors &
        pids="$pids $!"
        number=$((number + 1))
    done
    number=0
    for pid in $pids; do
        number=$((number + 1))
        if [ $((number % 5)) -eq 1 ]; then kill -9 "$pid" 2> /dev/null; fi
    done
    for pid in $pids; do wait "$pid" 2> /dev/null; done
    sleep 1.1
    "$bin" run --store r --key $key --effects non-repeatable -- sh -c "echo $key >> ledger" \
        2>> errors
    status=$?
    count=$(grep -c "^$key\$" ledger)
    echo "$key: ledger lines=$count, last status=$status"
    check "$key paid at most once" test "$count" -le 1
    check "$key done or in doubt" test "$status" -eq 0 -o "$status" -eq 94
    check "$key paid unless in doubt" test "$count" -eq 1 -o "$status" -eq 94
done

# 4. A command that pays and then fails with a time-out status.
pay() { "$bin" run --store r --key order-9 --effects non-repeatable -- sh -c \
    'echo order-9 >> ledger; exit 75' 2>> errors; }
pay
check "the status of the command comes through" test $? -eq 75
pay
check "refused while in doubt" test $? -eq 94
pay
check "refused again" test $? -eq 94
check "one line in the ledger" test "$(grep -c order-9 ledger)" -eq 1
epoch=$("$bin" in-doubt --store r --json | sed 's/},{/}\n{/g' | grep order-9 |
    sed 's/.*"epoch":\([0-9]*\).*/\1/')
"$bin" resolve --store r --key order-9 --epoch "$epoch" applied --outcome receipt
check "resolved" test $? -eq 0
check "a duplicate gets the outcome" test "$(pay)" = receipt
check "still one line" test "$(grep -c order-9 ledger)" -eq 1

exit $failed
