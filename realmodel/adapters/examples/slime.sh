# slime at commit 624b824a: what to add to the arguments of its train.py (source this file into a script of slime's own).
# The package mismatch-sandbox must be importable in Ray's workers (pip install it in slime's container).
MISMATCH_ARGS=(
    --use-tis
    --custom-tis-function-path realmodel.adapters.slime_tis.tis
    --custom-config-path "$(dirname "${BASH_SOURCE[0]}")/slime.yaml"
)
