#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes calls.inc: for every argument struct of the public headers, the names of its members and its functions.

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
    for header in headers:
        text = re.sub(r"/\*.*?\*/", "", open(header, encoding="utf-8").read(), flags=re.S)
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
            structs.append(f"    {struct} {name};")
            rows.append(f'    {{"{name}", sizeof({struct}), {name}_fields, {len(fields)}, {name}_run}},')
    lines += ["typedef union any_args {", *structs, "} any_args;", "static const call calls[] = {", *rows, "};", ""]
    with open(output, "w", encoding="utf-8") as file:
        file.write("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
