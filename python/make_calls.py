#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes calls.inc: for every argument struct of the public headers, the names of its members and its functions: cot_NAME,
and cot_parallel_NAME if there is one.

The extension uses these tables to read Python's arguments, so only the headers define the arguments of a call.

    make_calls.py OUTPUT HEADER...
"""
import re
import sys

KINDS = {
    "cot_tensor": "TENSOR",
    "double": "DOUBLE",
    "int32_t": "INT32",
    "cot_activation": "INT32",
    "int64_t": "INT64",
    "uint64_t": "UINT64",
}
OURS = ("struct_size", "workspace", "workspace_bytes")  # set by the extension


def main(output, headers):
    lines, structs, rows = [], [], []
    texts = [re.sub(r"/\*.*?\*/", "", open(header, encoding="utf-8").read(), flags=re.S) for header in headers]
    over_groups = {name for text in texts for name in re.findall(r"\bcot_parallel_(\w+)\(", text)}
    for text in texts:
        for name, body in re.findall(r"typedef struct cot_(\w+)_args \{(.*?)\}", text, flags=re.S):
            members = [member.split() for member in body.split(";") if member.strip()]
            fields = [(member, kind) for kind, member in members if member not in OURS and not member.startswith("*")]
            struct = f"cot_{name}_args"
            lines.append(f"static const field {name}_fields[] = {{")
            for member, kind in fields:
                lines.append(f'    {{"{member}", {KINDS[kind]}, offsetof({struct}, {member})}},')
            lines.append("};")
            lines.append(f"static cot_status {name}_run(cot_queue *queue, const void *args)")
            lines.append(f"{{\n    return cot_{name}(queue, args);\n}}")
            over_group = "NULL"
            if name in over_groups:
                over_group = f"{name}_run_over_group"
                lines.append(f"static cot_status {over_group}(cot_group *group, cot_queue *queue,")
                lines.append("    const cot_parallel_options *options, const void *args)")
                lines.append(f"{{\n    return cot_parallel_{name}(group, queue, options, args);\n}}")
            structs.append(f"    {struct} {name};")
            rows.append(f'    {{"{name}", sizeof({struct}), {name}_fields, {len(fields)}, {name}_run, {over_group}}},')
    lines += ["typedef union any_args {", *structs, "} any_args;", "static const call calls[] = {", *rows, "};", ""]
    with open(output, "w", encoding="utf-8") as file:
        file.write("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
