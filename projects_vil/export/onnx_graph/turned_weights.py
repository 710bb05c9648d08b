"""Weights as the products with them take them: a quantiser knows a weight by its being a constant."""


def turn_weights(graph) -> None:
    """Make constants of what an ``onnx.GraphProto`` without branches makes of constants by Transpose alone.

    The exporter's optimiser leaves the large ones that are used more than once, as by tokens and global tokens. The new
    name begins with the old one, which has the path of the module.
    """
    import onnx

    if any(attribute.type == onnx.AttributeProto.GRAPH for node in graph.node for attribute in node.attribute):
        raise NotImplementedError("weights of a graph with branches")
    weights = {tensor.name: tensor for tensor in graph.initializer}
    new_names = {}
    for node in [node for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights]:
        weight = node.input[0]
        perm = next((tuple(attribute.ints) for attribute in node.attribute if attribute.name == "perm"), None)
        new_names[node.output[0]] = name = f"{weight}.{node.output[0]}"
        turned = onnx.numpy_helper.to_array(weights[weight]).transpose(perm)
        graph.initializer.append(onnx.numpy_helper.from_array(turned, name))
        graph.node.remove(node)
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = new_names.get(name, name)
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for tensor in [tensor for tensor in weights.values() if tensor.name not in used]:
        graph.initializer.remove(tensor)
