#!/usr/bin/env bash
# The core alone: in a fresh environment, in which importing torch raises, checkpoints and adapters
# are planned, merged, verified and reverted.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet -c constraints.txt .
python=$work/venv/bin/python

mkdir "$work/blocked"
echo "raise ImportError('torch is no part of the core')" > "$work/blocked/torch.py"
export PYTHONPATH="$work/blocked:tests/helpers:tests/merge" LAYERSWAP_CACHE="$work/cache"

"$python" - "$work/world" <<'END'
import sys
from pathlib import Path

from plain_checkpoints import write_adapter, write_family

root = Path(sys.argv[1])
for dtype in ("F32", "BF16"):
    folders = write_family(root / dtype, dtype)
write_adapter(root / "adapters" / "task", folders["base"], 0, 3)
write_adapter(root / "adapters" / "language", folders["base"], 1, 4, use_rslora=True)
END

layerswap() { echo "+ layerswap $*"; "$python" -m layerswap "$@"; }
for dtype in F32 BF16; do
  world=$work/world/$dtype
  experts=(--task-expert "$world/task" --language-expert "$world/language")
  layerswap plan "${experts[@]}" --base "$world/base" --weights magnitude
  layerswap merge "${experts[@]}" --out "$world/merged"
  layerswap verify "$world/merged" --full
  layerswap revert --base "$world/base" --expert "$world/task" --keep 0.2 --out "$world/sparse"
done
adapters=(--task-expert "$work/world/adapters/task" --language-expert "$work/world/adapters/language")
layerswap merge "${adapters[@]}" --out "$work/adapter"
layerswap verify "$work/adapter"
layerswap merge "${adapters[@]}" --bake --out "$work/baked"
layerswap verify "$work/baked" --full

# Every method, dtype and kind of source gives the bytes that it gave with torch.
"$python" tests/merge/output_bytes.py
