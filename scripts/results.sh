#!/usr/bin/env bash
# Everything that docs/results.md and docs/paper-results.md report: hours on two cores; cut it off, it goes on.
#
#   scripts/results.sh DIR [RUN ...]     results go to DIR; runs: own others ten tuned ttt c10 c100 gn
#                                        cct rank steps cost published protocols changing10 rivals strong
#
# c10, c100, gn, rivals, published, protocols and changing10 need the checkpoints of docs/networks.md in $WEIGHTS (default:
# ../shared/data/weights) and CIFAR-100 in $CIFAR100; strong needs the network of scripts/train_strong.sh in $STRONG.
# Then: python scripts/write_results.py DIR
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
to=${1:?where the results go}
shift
runs=${*:-own others ten tuned ttt c10 c100 gn cct rank steps cost published protocols changing10 rivals strong}
rivals=source,bn,wiener,tent,eata,roid
everything=$rivals,sar,ttapca-relu,ttapca-exp,rotta,pea
weights=${WEIGHTS:-$here/../shared/data/weights}
c10=("$weights/cifar10_resnet20.pth" --normalise cifar10)
c100=("$weights/cifar100_resnet20.pth" --normalise cifar100 --data cifar100 ${CIFAR100:+--in "$CIFAR100"})
gn=("$weights/cifar10_rn26_gn_state_dict.pt" --normalise half)
mkdir -p "$to"

bench() { "$here/.venv/bin/ttapca" bench "$@" || true; } # a method that cannot run is in the file

# The paper's methods and the closed form in both settings, 2,000 images a corruption.
# `source` and `bn` do not learn and are run once.
tables() {
    bench "$@" --corruptions standard,clean --images 2000 --preset paper-table1 \
        --methods source,bn,tent,ttapca-exp,ttapca-relu,wiener,match,two-sided
    bench "$@" --corruptions standard,clean --images 2000 --preset paper-table2 \
        --methods tent,ttapca-exp,ttapca-relu,wiener
}

# Say to bench: these methods, or one method with an option such as tent.lr=0.01. The rank asks for
# principal components, which `wiener` alone would not get.
chosen() {
    case $1 in
    *wiener*) echo "--components 2000" ;;
    esac
    case $1 in
    *=*) echo "--methods ${1%%.*} --option $1" ;;
    *) echo "--methods $1" ;;
    esac
}

# compare IMAGES METHODS WORD ...: online, so many images a corruption; METHODS as `chosen` takes them.
compare() {
    local images=$1 methods=$2
    shift 2
    # shellcheck disable=SC2046  # these are several words
    bench "$@" --settings online --corruptions standard,clean --images "$images" $(chosen "$methods")
}

# The orders of docs/bench.md, of 2,000 images a corruption: all methods, with the learning rates of
# their papers for CIFAR-10. protocols FILE WORD ...
field=source,bn,wiener,tent,come,eata,rdumb,deyo,sar,roid,lame,rotta,unmix-tns,iabn,neo
protocols() {
    local file=$1 setting
    shift
    for setting in continual-correlated recurring mixed online correlated dirichlet-0.1 drifting \
        continual real-time; do
        bench "$@" --settings $setting --corruptions standard --images 2000 --methods $field \
            --option eata.lr=0.005 --option rdumb.lr=0.005 --to "$file"
    done
}

for run in $runs; do
    case $run in
    own) tables cifar10-resnet20 --to "$to/own.sqlite" ;;
    others)
        bench cifar10-resnet20 --settings online --corruptions standard,clean --images 1000 \
            --methods shot,slr+it,lame,cotta,ttapca-multiplicative --to "$to/others.sqlite"
        # One image at a time, 16 views of each: half an hour for a core.
        bench cifar10-resnet20 --settings episodic --images 1000 --methods memo \
            --to "$to/others.sqlite"
        ;;
    ten) compare 10000 "$everything" cifar10-resnet20 --to "$to/ten.sqlite" ;;
    tuned) # online, with the defaults and with the learning rates that `ttapca tune` found
        for words in "$everything" tent.lr=0.01 eata.lr=0.3 roid.lr=0.03 sar.lr=0.3 \
            ttapca-exp.lr=0.03 rotta.lr=0.01 wiener.views=2; do
            compare 2000 "$words" cifar10-resnet20 --to "$to/tuned.sqlite"
        done
        ;;
    ttt) bench cifar10-wrn10-rotation --settings episodic,online --images 1000 \
        --methods source,bn,tent,ttt --to "$to/ttt.sqlite" ;;
    c10) tables "${c10[@]}" --to "$to/c10.sqlite" ;;
    c100) tables "${c100[@]}" --to "$to/c100.sqlite" ;;
    gn) tables "${gn[@]}" --to "$to/gn.sqlite" ;;
    cct) bench cifar10-cct2 --settings episodic,online --corruptions standard,clean --images 1000 \
        --methods source,neo,t3a,wiener --components 2000 --to "$to/cct.sqlite" ;;
    rank) # one seed: the intervals are over images
        bench cifar10-resnet20 --preset paper-rank --images 2000 --seeds 0 --to "$to/rank.sqlite" ;;
    steps)
        bench cifar10-resnet20 --preset paper-steps --images 2000 --seeds 0 --to "$to/steps.sqlite" ;;
    cost) bench cifar10-resnet20 --settings online --images 400 --to "$to/cost.sqlite" \
        --corruptions gaussian_noise,defocus_blur,frost,contrast,jpeg_compression \
        --methods source,bn,tent,ttapca-exp,ttapca-relu,ttapca-closed,wiener,shot,slr+it,eata,sar,roid,lame,cotta ;;
    published) # the "correlated" rows of mariodoebler/test-time-adaptation, as published
        for method in source,lame roid wiener tent sar rotta; do
            bench "${gn[@]}" --settings continual-correlated --corruptions standard --images 10000 \
                --methods $method --to "$to/published.sqlite"
        done
        bench "${gn[@]}" --settings continual-correlated --corruptions standard --images 10000 \
            --methods eata --option eata.lr=0.001 --option eata.optimiser=adam \
            --to "$to/published.sqlite"
        ;;
    protocols)
        protocols "$to/protocols10.sqlite" "${c10[@]}"
        protocols "$to/protocolsown.sqlite" cifar10-resnet20
        protocols "$to/protocolsgn.sqlite" "${gn[@]}"
        ;;
    changing10) # never starting anew; `gradual` has nine severities a corruption
        field=source,bn,wiener,tent,eata,roid,lame,rotta
        for words in drifting:2000 gradual:500; do
            bench "${c10[@]}" --settings "${words%:*}" --corruptions standard --images "${words#*:}" \
                --methods $field --option eata.lr=0.005 --to "$to/changing10.sqlite"
        done
        ;;
    rivals) # other people's networks
        compare 10000 "$rivals" "${c10[@]}" --to "$to/rivals10.sqlite"
        compare 10000 "$rivals" "${c100[@]}" --to "$to/rivals100.sqlite"
        compare 10000 "$rivals" "${gn[@]}" --to "$to/rivalsgn.sqlite"
        ;;
    strong)
        for words in source,bn,wiener,tent,roid wiener.views=2; do
            compare 2000 "$words" "${STRONG:?weights of scripts/train_strong.sh}" --to "$to/strong.sqlite"
        done
        ;;
    *)
        echo "no run \`$run\`" >&2
        exit 2
        ;;
    esac
done
