#!/usr/bin/env bash
# Plain ssh: the same two lines on every machine, NODE_RANK 0 on the one whose address is HOST.
#   NODE_RANK=0 HOST=10.0.0.1 NODES=4 examples/clusters/torchrun.sh config.yaml
# ELASTIC=16:32 instead of NODE_RANK lets nodes be lost and come back (docs/launching.md).
set -euo pipefail
config=$1
shift
: "${HOST:?the address of the first machine}" "${NODES:?how many machines, or 2:4 with ELASTIC}"
torchrun=(torchrun --nproc-per-node "${DEVICES:-8}" --nnodes "$NODES")
if [ -n "${ELASTIC:-}" ]; then
    # Ranks that start again must not read the addresses of those that are gone.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun+=(--rdzv-backend c10d --rdzv-endpoint "$HOST:29500" --rdzv-id "${JOB:?a name that no other job has}")
    exec "${torchrun[@]}" --max-restarts 100 -m expertmesh train "$config" --elastic "$ELASTIC" "$@"
fi
torchrun+=(--master-addr "$HOST" --master-port 29500 --node-rank "${NODE_RANK:?this machine, from 0}")
exec "${torchrun[@]}" -m expertmesh train "$config" "$@"
