"""Small chat templates of the model families: like the originals in which fields they read and how they join them."""

from __future__ import annotations

MISTRAL_LIST = (
    "<s>{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    "{% if tools and message == asked[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ message['content'] }}[/INST]"
    "{% elif message.tool_calls is defined %}{{ '[TOOL_CALLS] [' }}{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids of calls must have nine characters') }}{% endif %}"
    "{{ (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}{{ ', ' if not loop.last }}"
    "{% endfor %}]</s>"
    "{% elif message['role'] == 'tool' %}"
    '[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ ' ' + message['content'] }}</s>{% endif %}{% endfor %}"
)
MISTRAL_NAMED = (
    "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}[INST]{{ message['content'] }}[/INST]"
    "{% elif message['role'] == 'tool' %}[TOOL_RESULTS]{{ message['content'] }}[/TOOL_RESULTS]"
    "{% else %}{{ message['content'] or '' }}{% for call in message.tool_calls or [] %}"
    "{% set given = call.function.arguments %}"
    "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (given if given is string else given | tojson) }}"
    "{% endfor %}</s>{% endif %}{% endfor %}"
)
DEEPSEEK3 = (
    "{% if tools %}## Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% elif message['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}"
    "{% elif message['tool_calls'] is defined %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}"
    "{% for tool in message['tool_calls'] %}{{ '\\n' if not loop.first }}"
    "{{ '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' "
    "+ '\\n' + tool['function']['arguments'] + '\\n' + '```' + '<｜tool▁call▁end｜>' }}"
    "{% endfor %}{{ '<｜tool▁calls▁end｜>' }}"
    "{% else %}{{ '<｜Assistant｜>' + message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
DEEPSEEK31 = (
    "{% if tools %}## Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% elif message['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}"
    "{% elif message['tool_calls'] is defined %}{{ '<｜Assistant｜></think><｜tool▁calls▁begin｜>' }}"
    "{% for tool in message['tool_calls'] %}"
    "{{ '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] "
    "+ '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}"
    "{% else %}{{ '<｜Assistant｜></think>' + message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
HARMONY = (
    "{% if tools %}<|start|>developer<|message|># Tools\n{% for tool in tools %}"
    "type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;\n"
    "{% endfor %}<|end|>{% endif %}"
    "{% set last = namespace(name='') %}{% for message in messages %}"
    "{% if message.role == 'assistant' and 'tool_calls' in message %}"
    "{% if '<|channel|>' in message.content %}{{ raise_exception('channels in content') }}{% endif %}"
    "{% if message.content and message.thinking %}{{ raise_exception('content or thinking, not both') }}{% endif %}"
    "{% if message.content or message.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ message.content or message.thinking }}<|end|>{% endif %}"
    "{% set call = message.tool_calls[0].function %}{% set last.name = call.name %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}"
    "<|call|>{% elif message.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>"
    "{% elif message.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ message.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
QWEN3_CODER = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for tool in tools %}"
    "{% set tool = tool.function if tool.function is defined else tool %}\n<function>\n<name>{{ tool.name }}</name>"
    "{{ tool.parameters | tojson | safe }}</function>{% endfor %}</tools>\nReply in this form:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'assistant' and message.tool_calls %}"
    "<|im_start|>assistant\n{% if message.content is string and message.content | trim | length > 0 %}"
    "{{ message.content | trim + '\n\n' }}{% endif %}{% for call in message.tool_calls %}"
    "{% if call.function is defined %}{% set call = call.function %}{% endif %}"
    "{{ '<tool_call>\n<function=' + call.name + '>\n' }}{% for key, value in call.arguments | items %}"
    "{{ '<parameter=' + key + '>\n' }}"
    "{% set value = value | tojson | safe if value is mapping or (value is sequence and value is not string) "
    "else value | string %}{{ value }}{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}"
    "{{ '\n' if not loop.last }}{% endfor %}<|im_end|>\n"
    "{% elif message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "<|im_end|>\n{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GLM45 = (
    "[gMASK]<sop>{% if tools %}<|system|>\n# Tools\n<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "</tools>\n<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n...\n"
    "</tool_call>{% endif %}"
    "{% macro shown(content) %}{{ content }}{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ shown(m.content) }}"
    "{% elif m.role == 'assistant' %}<|assistant|>"
    "{% if shown(m.content).strip() %}{{ '\n' + shown(m.content).strip() }}{% endif %}"
    "{% for tc in m.tool_calls or [] %}{% if tc.function %}{% set tc = tc.function %}{% endif %}"
    "{{ '\n<tool_call>' + tc.name + '\n' }}{% set _args = tc.arguments %}{% for k, v in _args.items() %}"
    "<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>\n{% endfor %}</tool_call>"
    "{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|system|>\n{{ shown(m.content) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MINIMAX_M2 = (
    "{% set toolcall_begin_token = '<minimax:tool_call>' %}{% set toolcall_end_token = '</minimax:tool_call>' %}"
    "]~!b[]~b]system\n{% if tools %}# Tools\n<tools>{% for tool in tools %}\n<tool>{{ tool.function | tojson }}</tool>"
    "{% endfor %}\n</tools>\n\n{{ toolcall_begin_token }}\n"
    '<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1</parameter>\n...\n</invoke>\n'
    "{{ toolcall_end_token }}{% endif %}[e~[\n"
    "{% for message in messages %}{% if message.role == 'assistant' %}]~b]ai\n{{ message.content or '' }}"
    "{% if message.tool_calls %}{{ '\n' ~ toolcall_begin_token ~ '\n' }}{% for call in message.tool_calls %}"
    "{% if call.function %}{% set call = call.function %}{% endif %}"
    "{{ '<invoke name=\"' + call.name + '\">\n' }}{% for key, value in call.arguments.items() %}"
    "{{ '<parameter name=\"' + key + '\">' }}"
    "{{ value | tojson(ensure_ascii=False) if value is not string else value }}{{ '</parameter>\n' }}{% endfor %}"
    "{{ '</invoke>\n' }}{% endfor %}{{ toolcall_end_token }}{% endif %}[e~[\n"
    "{% elif message.role == 'tool' %}]~b]tool\n<response>{{ message.content }}</response>[e~[\n"
    "{% else %}]~b]{{ message.role }}\n{{ message.content }}[e~[\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n{% endif %}"
)
DEEPSEEK32 = (
    "{% set dsml = '｜DSML｜' %}{% if tools %}## Tools\n<{{ dsml }}function_calls>\n"
    '<{{ dsml }}invoke name="$FUNCTION_NAME">\n'
    '<{{ dsml }}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{{ dsml }}parameter>\n...\n'
    "</{{ dsml }}invoke>\n</{{ dsml }}function_calls>\n"
    "<functions>\n{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}</functions>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content or '' }}"
    "{% if message.tool_calls %}{{ '\n\n<' + dsml + 'function_calls>\n' }}{% for call in message.tool_calls %}"
    "{{ '<' + dsml + 'invoke name=\"' + call.function.name + '\">\n' }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ '<' + dsml + 'parameter name=\"' + key + '\" string=\"' + ('true' if value is string else 'false') + '\">' }}"
    "{{ value if value is string else value | tojson }}{{ '</' + dsml + 'parameter>\n' }}{% endfor %}"
    "{{ '</' + dsml + 'invoke>\n' }}{% endfor %}{{ '</' + dsml + 'function_calls>' }}{% endif %}<｜end▁of▁sentence｜>"
    "{% elif message.role == 'tool' %}\n\n<function_results>\n<result>{{ message.content }}</result>"
    "\n</function_results>\n\n"
    "{% elif message.role == 'user' %}<｜User｜>{{ message.content }}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
FAMILIES = {
    "mistral-list": MISTRAL_LIST,
    "mistral-named": MISTRAL_NAMED,
    "deepseek3": DEEPSEEK3,
    "deepseek3.1": DEEPSEEK31,
    "harmony": HARMONY,
    "qwen3-coder": QWEN3_CODER,
    "glm4.5": GLM45,
    "minimax-m2": MINIMAX_M2,
    "deepseek3.2": DEEPSEEK32,
}
