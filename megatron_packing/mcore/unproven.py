"""Which layers do packed runs refuse, whatever flags or script built them? Those that look from sample to sample.

The flags that ask for them are refused before (`config.check_megatron_flags`); a script or a layer spec of one's own
asks without flags.
"""

from torch import nn

from megatron_packing.errors import ConfigError


def check_layers(chunk: nn.Module) -> None:
    """Refuse a model chunk with layers that would mix samples, or that were never proven not to.

    Raises:
        ConfigError: a recurrent layer, multi-token prediction, or multi-latent attention; with its name.
    """
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.ssm.mamba_mixer import MambaMixer
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    refused = {
        MambaMixer: "would carry its state from sample to sample",
        GatedDeltaNet: "would carry its state from sample to sample",
        MultiTokenPredictionBlock: "would shift labels from sample to sample",
        MultiLatentAttention: "is not proven under packing",
    }
    for name, module in chunk.named_modules():
        for kind, why in refused.items():
            if isinstance(module, kind):
                raise ConfigError(
                    f"{name} is {type(module).__name__}, which {why}. Build the model without it, or leave packing out."
                )
