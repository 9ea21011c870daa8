"""A few steps of each setting: python smoke.py DATA STUDY.toml... [key=value...]"""
import sys, time; from pathlib import Path
import torch
from lowp.lab.study import read_study; from lowp.lab.settings import plan_of_study
from lowp.training.reading import with_overrides
from lowp.training.trainer import Trainer; from lowp.training.world import World
from lowp.health.audit import audit
from lowp.training.run import AUDIT_ALLOWS
from lowp.training.cuda_settings import cuda_settings
data=Path(sys.argv[1]); over=[a for a in sys.argv[2:] if "=" in a]
world=World.join("auto",1)
bad=0
for p in [a for a in sys.argv[2:] if "=" not in a]:
    for s in plan_of_study(read_study(Path(p))).settings:
        try:
            r=with_overrides(s.recipe, over)
            with cuda_settings(r, world.device):
                t=Trainer(r,world,data); n=t.parameters; began=time.perf_counter()
                if r.precision.audit:
                    with audit(mode="report",allow=AUDIT_ALLOWS) as rep: t.train_step()
                    assert rep.clean, rep.verdict
                else: t.train_step()
                first=time.perf_counter()-began; began=time.perf_counter(); steps=3
                for _ in range(steps): t.train_step()
                m=t.take_metrics(); 
                if world.device.type=="cuda": torch.cuda.synchronize()
                each=(time.perf_counter()-began)/steps; t.close()
            print(f"{s.name:40s} first {first:6.2f} s, step {1e3*each:8.1f} ms, {t.steps} steps, about {each*t.steps:6.1f} s, loss {m['loss']:.3f}",flush=True)
        except Exception as e:
            bad+=1; print(f"{s.name:40s} FAILED {type(e).__name__}: {e}"[:400],flush=True)
print("failed:",bad)
