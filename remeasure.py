import re, subprocess, pathlib
moves = {"machine_facts": "profiling.machines","ceilings": "profiling.peaks","kernel_profile": "profiling.kernel_report","cluster_profiling": "profiling.cluster_profile",
 "part_profiling": "shard_planning.timing","part_estimates": "shard_planning.estimates","target_code": "profiling.kernels","kernel_calls":"profiling.kernels","model_profiling":"profiling.cluster_profile"}
for f in subprocess.run(["git", "ls-files"], capture_output=True, text=True).stdout.split():
    p = pathlib.Path(f)
    if p.suffix not in (".py", ".md") or not p.exists(): continue
    try: t = p.read_text()
    except UnicodeDecodeError: continue
    n = t
    for old, new in moves.items():
        n = re.sub(rf"tvm_split\.measuring\.{old}\b", "tvm_split."+new, n)
        n = re.sub(rf"tvm_split/measuring/{old}\b", "tvm_split/"+new.replace(".", "/"), n)
    n = n.replace("tvm_split.measuring", "tvm_split.profiling").replace("tvm_split/measuring", "tvm_split/profiling")
    if n != t: p.write_text(n); print(f)
