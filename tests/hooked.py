"""Hooks on transformers' models, by the names that Plume gives to the same places."""

from contextlib import contextmanager

import torch


def their_answer(theirs, tokens, source=None):
    given = {"input_ids": torch.tensor([tokens])}
    if theirs.config.is_encoder_decoder:
        given = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([tokens])}
    found = theirs(**given)
    if "start_logits" in found:
        return torch.stack([found.start_logits, found.end_logits], -1)[0]
    return found.logits[0]


def gpt_sites(model):
    """The sites of GPT-2 and GPT-1: (module, side, columns) by our names."""
    width, size, last = slice(None), model.config.n_embd, len(model.transformer.h) - 1
    found = {"decoder.embedding": (model.transformer.drop, "output", width)}
    for i, block in enumerate(model.transformer.h):
        at = f"decoder.{i}"
        for n, name in enumerate("qkv"):
            found[f"{at}.attention.{name}"] = (block.attn.c_attn, "output", slice(n * size, (n + 1) * size))
        found |= {
            f"{at}.attention.heads": (block.attn.c_proj, "input", width),
            f"{at}.attention.update": (block.attn.c_proj, "output", width),
            f"{at}.attention.norm": (block.ln_1, "output", width),
            f"{at}.mlp.norm": (block.ln_2, "output", width),
            f"{at}.mlp.up": (block.mlp.c_fc, "output", width),
            f"{at}.mlp.activation": (block.mlp.c_proj, "input", width),
            f"{at}.mlp.update": (block.mlp.c_proj, "output", width),
        }
        if hasattr(model.transformer, "ln_f"):
            found[f"{at}.attention.input"] = (block.ln_1, "input", width)
            found[f"{at}.mlp.input"] = (block.ln_2, "input", width)
            found["decoder.final_norm"] = (model.transformer.ln_f, "output", width)
            found[f"decoder.{last}.mlp.output"] = (model.transformer.ln_f, "input", width)
        else:
            found[f"{at}.attention.input"] = (block.attn.c_attn, "input", width)
            found[f"{at}.attention.sum"] = (block.ln_1, "input", width)
            found[f"{at}.mlp.sum"] = (block.ln_2, "input", width)
            found[f"{at}.mlp.output"] = (block.ln_2, "output", width)
    return found


def bert_sites(model):
    width = slice(None)
    found = {"encoder.embedding": (model.bert.embeddings, "output", width)}
    for i, layer in enumerate(model.bert.encoder.layer):
        at, attention = f"encoder.{i}", layer.attention
        found |= {
            f"{at}.attention.q": (attention.self.query, "output", width),
            f"{at}.attention.k": (attention.self.key, "output", width),
            f"{at}.attention.v": (attention.self.value, "output", width),
            f"{at}.attention.heads": (attention.output.dense, "input", width),
            f"{at}.attention.update": (attention.output.dense, "output", width),
            f"{at}.attention.sum": (attention.output.LayerNorm, "input", width),
            f"{at}.attention.output": (attention.output.LayerNorm, "output", width),
            f"{at}.mlp.up": (layer.intermediate.dense, "output", width),
            f"{at}.mlp.activation": (layer.output.dense, "input", width),
            f"{at}.mlp.update": (layer.output.dense, "output", width),
            f"{at}.mlp.sum": (layer.output.LayerNorm, "input", width),
            f"{at}.mlp.output": (layer.output.LayerNorm, "output", width),
        }
    return found


def marian_sites(model):
    width, found = slice(None), {}
    for stack in ("encoder", "decoder"):
        layers = getattr(model.model, stack).layers
        found[f"{stack}.embedding"] = (layers[0].self_attn.q_proj, "input", width)
        for i, layer in enumerate(layers):
            kinds = {"attention": (layer.self_attn, layer.self_attn_layer_norm)}
            if stack == "decoder":
                kinds["cross"] = (layer.encoder_attn, layer.encoder_attn_layer_norm)
            for kind, (attention, norm) in kinds.items():
                at = f"{stack}.{i}.{kind}"
                found |= {f"{at}.{name}": (getattr(attention, f"{name}_proj"), "output", width) for name in "qkv"}
                found |= {
                    f"{at}.heads": (attention.out_proj, "input", width),
                    f"{at}.update": (attention.out_proj, "output", width),
                    f"{at}.sum": (norm, "input", width),
                    f"{at}.output": (norm, "output", width),
                }
            found |= {
                f"{stack}.{i}.mlp.up": (layer.fc1, "output", width),
                f"{stack}.{i}.mlp.activation": (layer.fc2, "input", width),
                f"{stack}.{i}.mlp.update": (layer.fc2, "output", width),
                f"{stack}.{i}.mlp.sum": (layer.final_layer_norm, "input", width),
                f"{stack}.{i}.mlp.output": (layer.final_layer_norm, "output", width),
            }
    return found


def their_sites(theirs):
    """(module, side, columns) by our names, for every class that opens a folder of ours."""
    if theirs.config.is_encoder_decoder:
        return marian_sites(theirs)
    return bert_sites(theirs) if hasattr(theirs, "bert") else gpt_sites(theirs)


@contextmanager
def hooks(sites, change):
    """change(name, value) at every site of theirs; what it returns takes the value's place."""
    handles = []
    for name, (module, side, columns) in sites.items():

        def before(module, args, name=name, columns=columns):
            new = change(name, args[0][..., columns])
            if new is not None:
                whole = args[0].clone()
                whole[..., columns] = new
                return (whole, *args[1:])
            return None

        def after(module, args, result, name=name, columns=columns):
            new = change(name, result[..., columns])
            if new is not None:
                whole = result.clone()
                whole[..., columns] = new
                return whole
            return None

        handles.append(
            module.register_forward_pre_hook(before) if side == "input" else module.register_forward_hook(after)
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def recorded(theirs, tokens, source=None):
    """Every site's value for one text, and the logits."""
    found = {}
    with torch.no_grad(), hooks(their_sites(theirs), lambda name, x: found.__setitem__(name, x[0].clone())):
        found["logits"] = their_answer(theirs, tokens, source)
    return found
