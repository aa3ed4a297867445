"""Priority-ranked operator dispatch for transformer models.

The public names, and nothing else: importing this loads neither torch nor any kernel.
"""

from transformer_engine_fl.core.contract import (
    Backward,
    Between,
    Contract,
    Sample,
    Tolerance,
    contract,
)
from transformer_engine_fl.core.errors import (
    AllCandidatesFailedError,
    ArgumentError,
    ConfigurationError,
    DuplicateImplError,
    NoImplementationError,
    NotSupportedError,
    PartialMutationError,
    PluginError,
    RegistrationError,
    SignatureMismatchError,
    StrictModeError,
    TeFlError,
    UnknownOperatorError,
)
from transformer_engine_fl.core.manager import (
    OpManager,
    get_default_manager,
    reset_default_manager,
)
from transformer_engine_fl.core.policy import (
    SelectionPolicy,
    get_policy,
    policy_context,
    reset_global_policy,
    set_global_policy,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.core.selection import Decision, Verdict
from transformer_engine_fl.core.types import BackendImplKind, OpImpl

__version__ = "0.1.0"

__all__ = [
    "AllCandidatesFailedError",
    "ArgumentError",
    "BackendImplKind",
    "Backward",
    "Between",
    "ConfigurationError",
    "Contract",
    "Decision",
    "DuplicateImplError",
    "NoImplementationError",
    "NotSupportedError",
    "OpImpl",
    "OpManager",
    "OpRegistry",
    "PartialMutationError",
    "PluginError",
    "RegistrationError",
    "Sample",
    "SelectionPolicy",
    "SignatureMismatchError",
    "StrictModeError",
    "TeFlError",
    "Tolerance",
    "UnknownOperatorError",
    "Verdict",
    "__version__",
    "contract",
    "get_default_manager",
    "get_policy",
    "policy_context",
    "reset_default_manager",
    "reset_global_policy",
    "set_global_policy",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
]
