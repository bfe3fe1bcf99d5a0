"""OpenRLHF's own base class takes the agent executor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_AS_OPENRLHF = """
import importlib.util, sys, types
from pathlib import Path

folder = Path(next(iter(importlib.util.find_spec("openrlhf").submodule_search_locations)))
package = types.ModuleType("openrlhf.utils")  # its own __init__ draws deepspeed and vLLM
package.__path__ = [str(folder / "utils")]
sys.modules["openrlhf.utils"] = package
from openrlhf.utils.agent import AgentExecutorBase
spec = importlib.util.spec_from_file_location("agent_module", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert issubclass(module.AgentExecutor, AgentExecutorBase)
assert not issubclass(dict, AgentExecutorBase)
module.AgentExecutor()
"""


def test_d1_openrlhf_takes_it_as_its_own(tmp_path: Path) -> None:
    """As OpenRLHF loads the file of `--train.agent_func_path`, with its own base class."""
    file = tmp_path / "agent.py"
    file.write_text(
        "from toolroll.rollout.adapters import openrlhf\n\n\nclass "
        "AgentExecutor(openrlhf.AgentExecutor):\n    pass\n"
    )
    subprocess.run([sys.executable, "-c", _AS_OPENRLHF, str(file)], check=True)
