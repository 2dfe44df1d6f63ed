from areal_ray.data.source import Draw, PromptSource, load_prompts

__all__ = ["Draw", "PromptSource", "load_prompts"]
