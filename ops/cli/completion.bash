_logferry() {
    local words="@COMMANDS@"
    if [ "$COMP_CWORD" -gt 1 ]; then
        case "${COMP_WORDS[1]}" in
@CASES@
            *) words="" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -o bashdefault -F _logferry logferry
