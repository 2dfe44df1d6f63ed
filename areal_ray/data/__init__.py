from areal_ray.data.source import PromptSource, load_prompts

__all__ = ["PromptSource", "load_prompts"]
