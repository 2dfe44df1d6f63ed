from areal_ray.data.source import PromptSource, SourceState, load_prompts

__all__ = ["PromptSource", "SourceState", "load_prompts"]
