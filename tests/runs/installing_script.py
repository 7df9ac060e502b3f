"""A user's own script: imports everything first, as scripts do, and calls install() before arguments are parsed."""

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from pretrain_gpt import BATCH_KEYS, forward_step, train_valid_test_datasets_provider  # noqa: F401

from megatron_packing.mcore import hooks

if __name__ == "__main__":
    hooks.install()
    args = parse_and_validate_args()
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
    )
