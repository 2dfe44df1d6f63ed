"""The scripts of `areal-ray completion`: the same few tables for each shell, and how it uses them.

    keys       every key of the config
    values     of a key, where they can be listed
    options    of a command
    behind     what comes behind an option of a command
    place      what stands in a command's n-th place

"What" is one of `files`, `dirs`, `configs`, `overrides`, `value` (nobody can know), or the words
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from areal_ray.cli.completion import NOTHING, OVERRIDES, Argument, Command

Values = Mapping[str, tuple[str, ...]]


def bash(commands: Sequence[Command], values: Values) -> str:
    return _filled(BASH, commands, values, case=_posix_case)


def zsh(commands: Sequence[Command], values: Values) -> str:
    described = " ".join(_quoted(f"{one.name}:{one.help}") for one in commands)
    return _filled(ZSH, commands, values, case=_posix_case).replace("@DESCRIBED@", described)


def fish(commands: Sequence[Command], values: Values) -> str:
    lines = [
        f"complete -c areal-ray -n __areal_ray_needs_command -a {one.name} -d {_quoted(one.help)}"
        for one in commands
    ]
    lines += [_fish_option(one.name, option) for one in commands for option in one.options]
    script = _filled(FISH, commands, values, case=_fish_case)
    return script.replace("@COMPLETIONS@", "\n".join(lines))


def _filled(
    script: str,
    commands: Sequence[Command],
    values: Values,
    *,
    case: Callable[[Mapping[str, str]], str],
) -> str:
    places: dict[str, str] = {}
    for one in commands:
        for number, place in enumerate(one.places, start=1):
            # The last of them may stand in all places that follow.
            where = f"{one.name} {'*' if place.takes == OVERRIDES else number}"
            places[where] = _what(place)
    tables = {
        "@COMMANDS@": " ".join(one.name for one in commands),
        "@KEYS@": " ".join(values),
        "@VALUES@": case({key: " ".join(known) for key, known in values.items() if known}),
        "@OPTIONS@": case({one.name: " ".join(_flags(one)) for one in commands}),
        "@BEHIND@": case(
            {
                f"{one.name} {flag}": _what(option)
                for one in commands
                for option in one.options
                if option.takes != NOTHING
                for flag in option.flags
            }
        ),
        "@PLACE@": case(places),
    }
    for name, table in tables.items():
        script = script.replace(name, table)
    return script


def _flags(command: Command) -> list[str]:
    return [flag for option in command.options for flag in option.flags]


def _what(argument: Argument) -> str:
    return " ".join(argument.choices) or argument.takes


def _posix_case(table: Mapping[str, str]) -> str:
    lines = [f"    {_pattern(key)}) echo {_quoted(value)} ;;" for key, value in table.items()]
    return "\n".join(lines)


def _pattern(key: str) -> str:
    return f"{_quoted(key[:-1])}*" if key.endswith("*") else _quoted(key)


def _fish_case(table: Mapping[str, str]) -> str:
    return "\n".join(
        f"        case {_quoted(key)}\n            string split ' ' -- {_quoted(value)}"
        for key, value in table.items()
    )


def _fish_option(command: str, option: Argument) -> str:
    spelled = " ".join(
        f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags
    )
    line = f"complete -c areal-ray -n '__fish_seen_subcommand_from {command}' {spelled}"
    if option.takes != NOTHING:
        line += " -x -a '(__areal_ray_argument)'"
    return f"{line} -d {_quoted(option.help)}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


BASH = r"""# Completion of areal-ray for bash: made by `areal-ray completion bash`.
_areal_ray_keys='@KEYS@'

_areal_ray_values() {
    case "$1" in
@VALUES@
    esac
}

_areal_ray_options() {
    case "$1" in
@OPTIONS@
    esac
}

_areal_ray_behind() {
    case "$1" in
@BEHIND@
    esac
}

_areal_ray_place() {
    case "$1" in
@PLACE@
    esac
}

# Each of the words that goes on from $cur, with a space behind it.
_areal_ray_words() {
    local word
    for word in $1; do
        [[ $word == "$cur"* ]] && COMPREPLY+=("$word ")
    done
}

_areal_ray_files() {
    local file
    while IFS= read -r file; do
        if [[ -d $file ]]; then
            COMPREPLY+=("$(printf %q "$file")/")
        elif [[ $1 == files || ( $1 == configs && $file == *.y*ml ) ]]; then
            COMPREPLY+=("$(printf %q "$file") ")
        fi
    done < <(compgen -f -- "$cur")
}

# One section at a time: `trainer.`, then `trainer.lr=`.
_areal_ray_overrides() {
    local key rest next last=
    if [[ $cur == *=* ]]; then
        local name=${cur%%=*} prefix= value
        # Where bash breaks words at `=`, it completes just what is behind.
        [[ $COMP_WORDBREAKS == *=* ]] || prefix="$name="
        for value in $(_areal_ray_values "$name"); do
            [[ $value == "${cur#*=}"* ]] && COMPREPLY+=("$prefix$value ")
        done
        return
    fi
    for key in $_areal_ray_keys; do
        [[ $key == "$cur"* ]] || continue
        rest=${key#"$cur"}
        if [[ $rest == *.* ]]; then next="$cur${rest%%.*}."; else next="$key="; fi
        [[ $next == "$last" ]] || COMPREPLY+=("$next")
        last=$next
    done
}

_areal_ray_what() {
    case "$1" in
    value | '') ;;
    files | dirs | configs) _areal_ray_files "$1" ;;
    overrides) _areal_ray_overrides ;;
    *) _areal_ray_words "$1" ;;
    esac
}

_areal_ray() {
    local line=${COMP_LINE:0:COMP_POINT} cur command what place=1 index
    local -a words
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=('')
    cur=${words[${#words[@]} - 1]}
    command=${words[1]}
    COMPREPLY=()
    if ((${#words[@]} == 2)); then
        _areal_ray_words '@COMMANDS@ --help --version'
        return
    fi
    what=
    for ((index = 2; index < ${#words[@]} - 1; index++)); do
        if [[ -n $what ]]; then
            what=
        elif [[ ${words[index]} == -* ]]; then
            what=$(_areal_ray_behind "$command ${words[index]}")
        else
            ((place++))
        fi
    done
    if [[ -n $what ]]; then
        _areal_ray_what "$what"
    elif [[ $cur == -* ]]; then
        _areal_ray_words "$(_areal_ray_options "$command")"
    else
        _areal_ray_what "$(_areal_ray_place "$command $place")"
    fi
}

complete -o nospace -F _areal_ray areal-ray
"""

ZSH = r"""#compdef areal-ray
# Completion of areal-ray for zsh: made by `areal-ray completion zsh`.

_areal_ray_values() {
    case "$1" in
@VALUES@
    esac
}

_areal_ray_options() {
    case "$1" in
@OPTIONS@
    esac
}

_areal_ray_behind() {
    case "$1" in
@BEHIND@
    esac
}

_areal_ray_place() {
    case "$1" in
@PLACE@
    esac
}

# One section at a time: `trainer.`, then `trainer.lr=`.
_areal_ray_overrides() {
    local cur=${words[CURRENT]} key rest
    local -aU found
    if [[ $cur == *=* ]]; then
        compset -P '*='
        compadd -- ${=$(_areal_ray_values "${cur%%=*}")}
        return
    fi
    for key in @KEYS@; do
        [[ $key == "$cur"* ]] || continue
        rest=${key#"$cur"}
        if [[ $rest == *.* ]]; then found+=("$cur${rest%%.*}."); else found+=("$key="); fi
    done
    compadd -S '' -- $found
}

_areal_ray_what() {
    case "$1" in
    value | '') ;;
    files) _files ;;
    dirs) _files -/ ;;
    configs) _files -g '*.(yaml|yml)' ;;
    overrides) _areal_ray_overrides ;;
    *) compadd -- ${=1} ;;
    esac
}

_areal_ray() {
    local -a commands=(@DESCRIBED@)
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    local command=${words[2]} what= place=1 index
    for ((index = 3; index < CURRENT; index++)); do
        if [[ -n $what ]]; then
            what=
        elif [[ ${words[index]} == -* ]]; then
            what=$(_areal_ray_behind "$command ${words[index]}")
        else
            ((place++))
        fi
    done
    if [[ -n $what ]]; then
        _areal_ray_what "$what"
    elif [[ ${words[CURRENT]} == -* ]]; then
        compadd -- ${=$(_areal_ray_options "$command")}
    else
        _areal_ray_what "$(_areal_ray_place "$command $place")"
    fi
}

if [[ ${zsh_eval_context[-1]} == loadautofunc ]]; then
    _areal_ray "$@"
else
    compdef _areal_ray areal-ray
fi
"""

FISH = r"""# Completion of areal-ray for fish: made by `areal-ray completion fish`.

function __areal_ray_values
    switch $argv[1]
@VALUES@
    end
end

function __areal_ray_behind
    switch $argv[1]
@BEHIND@
    end
end

function __areal_ray_place
    switch $argv[1]
@PLACE@
    end
end

# One section at a time: `trainer.`, then `trainer.lr=`.
function __areal_ray_overrides
    set -l cur (commandline -ct)
    if string match -q '*=*' -- $cur
        set -l name (string split -m 1 = -- $cur)[1]
        for value in (__areal_ray_values $name)
            echo "$name=$value"
        end
        return
    end
    set -l length (string length -- "$cur")
    for key in @KEYS@
        test (string sub -l $length -- $key) = "$cur"; or continue
        set -l rest (string sub -s (math $length + 1) -- $key)
        if string match -q '*.*' -- $rest
            echo "$cur"(string split -m 1 . -- $rest)[1].
        else
            echo "$key="
        end
    end | uniq
end

function __areal_ray_what
    switch "$argv"
        case value ''
        case files
            __fish_complete_path (commandline -ct)
        case dirs
            __fish_complete_directories (commandline -ct)
        case configs
            __fish_complete_path (commandline -ct) |
                string match -r '^[^\t]*(?:\.ya?ml|/)(?:\t.*)?$'
        case overrides
            __areal_ray_overrides
        case '*'
            printf '%s\n' $argv
    end
end

function __areal_ray_needs_command
    test (count (commandline -opc)) -eq 1
end

# What comes behind the option before the cursor.
function __areal_ray_argument
    set -l words (commandline -opc)
    __areal_ray_what (__areal_ray_behind "$words[2] $words[-1]")
end

function __areal_ray_positional
    set -l words (commandline -opc)
    set -l what
    set -l place 1
    for word in $words[3..]
        if set -q what[1]
            set what
        else if string match -q -- '-*' $word
            set what (__areal_ray_behind "$words[2] $word")
        else
            set place (math $place + 1)
        end
    end
    set -q what[1]; or __areal_ray_what (__areal_ray_place "$words[2] $place")
end

complete -c areal-ray -f
complete -c areal-ray -n 'not __areal_ray_needs_command' -a '(__areal_ray_positional)'
@COMPLETIONS@
"""

SCRIPTS: dict[str, Callable[[Sequence[Command], Values], str]] = {
    "bash": bash,
    "zsh": zsh,
    "fish": fish,
}
