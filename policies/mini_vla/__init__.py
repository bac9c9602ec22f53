"""MiniVLA, a small vision-language-action policy; importing this registers it with LeRobot as `mini_vla`."""

from wmrl_embodied.policies.mini_vla.configuration_mini_vla import MiniVLAConfig
from wmrl_embodied.policies.mini_vla.modeling_mini_vla import MiniVLAPolicy
from wmrl_embodied.policies.mini_vla.processor_mini_vla import make_mini_vla_pre_post_processors

__all__ = ["MiniVLAConfig", "MiniVLAPolicy", "make_mini_vla_pre_post_processors"]
