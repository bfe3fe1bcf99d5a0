"""What `toolroll.agents` gives besides its modules; for type checkers only (docs/adr/0005-published-names.md)."""

from toolroll.agents.environments.tau_actions import RESPOND_ACTION_FIELD_NAME as RESPOND_ACTION_FIELD_NAME
from toolroll.agents.environments.tau_actions import RESPOND_ACTION_NAME as RESPOND_ACTION_NAME
from toolroll.agents.environments.tau_actions import TauAction as TauAction
from toolroll.agents.environments.tau_actions import call_to_action_sglang as call_to_action_sglang
from toolroll.agents.tool_calling import TrainableToolCallingAgent as TrainableToolCallingAgent
from toolroll.agents.tool_calling import agent_factory as agent_factory
from toolroll.agents.trainable import TOOL_INSTRUCTION as TOOL_INSTRUCTION
from toolroll.agents.trainable import TrainableAgentMixin as TrainableAgentMixin
from toolroll.rollout.types import InteractionResult as InteractionResult
from toolroll.rollout.types import Status as Status
