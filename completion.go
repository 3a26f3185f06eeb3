package main

import (
	"errors"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"warmroute/router/policy"
)

// newCompletionCommand prints scripts that make a shell complete our commands,
// flags and values.
func newCompletionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "completion bash|zsh|fish",
		Short: "Print the script for completion in bash, zsh or fish",
		Long: `Print the script that completes commands, flags and values in a shell. bash
needs the package bash-completion.`,
		Example: `  source <(warmroute completion bash)         # in ~/.bashrc
  warmroute completion zsh > "${fpath[1]}/_warmroute"
  warmroute completion fish > ~/.config/fish/completions/warmroute.fish`,
		ValidArgs:             []string{"bash", "zsh", "fish"},
		DisableFlagsInUseLine: true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 && slices.Contains(cmd.ValidArgs, args[0]) {
				return nil
			}
			return errors.New("name the shell: warmroute completion bash, zsh or fish")
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			root, out := cmd.Root(), cmd.OutOrStdout()
			switch args[0] {
			case "bash":
				return root.GenBashCompletionV2(out, true)
			case "zsh":
				return root.GenZshCompletion(out)
			}
			return root.GenFishCompletion(out, true)
		},
	}
}

// completeFlags gives the values that a shell may offer for the flags that a
// command has. What is not here completes to nothing, rather than to files.
func completeFlags(cmd *cobra.Command) {
	policies := func(known []string) func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return func(_ *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			// Behind a comma as well: the shell replaces the whole word.
			before := typed[:strings.LastIndex(typed, ",")+1]
			var offered []string
			for _, name := range known {
				if !slices.Contains(strings.Split(before, ","), name) {
					offered = append(offered, before+name)
				}
			}
			directive := cobra.ShellCompDirectiveNoFileComp
			if cmd.Name() == "replay" {
				directive |= cobra.ShellCompDirectiveNoSpace // another may follow
			}
			return offered, directive
		}
	}
	files := func(extensions ...string) cobra.CompletionFunc {
		return cobra.FixedCompletions(extensions, cobra.ShellCompDirectiveFilterFileExt)
	}
	known := policy.Names
	if cmd.Name() == "replay" {
		known = append(replayPolicies(), "all")
	}
	values := map[string]cobra.CompletionFunc{
		"config":      files("yaml", "yml"),
		"trace":       files("jsonl", "json"),
		"plot":        files("svg"),
		"policy":      policies(known),
		"log-level":   cobra.FixedCompletions([]string{"debug", "info", "warn", "error"}, cobra.ShellCompDirectiveNoFileComp),
		"workload":    cobra.FixedCompletions(workloadNames(), cobra.ShellCompDirectiveNoFileComp),
		"listen":      cobra.FixedCompletions([]string{":8080", "127.0.0.1:8080"}, cobra.ShellCompDirectiveNoFileComp),
		"admin":       cobra.FixedCompletions([]string{"127.0.0.1:9090"}, cobra.ShellCompDirectiveNoFileComp),
		"url":         cobra.FixedCompletions([]string{"http://127.0.0.1:8080"}, cobra.ShellCompDirectiveNoFileComp|cobra.ShellCompDirectiveNoSpace),
		"api-key-env": environmentNames,
	}
	anyFile := []string{"api-key-file", "file", "token-file"} // what shells complete by themselves
	if cmd.ValidArgsFunction == nil && cmd.ValidArgs == nil {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		complete, ok := values[f.Name]
		if !ok {
			complete = cobra.NoFileCompletions
		}
		if f.Value.Type() == "bool" || slices.Contains(anyFile, f.Name) {
			return
		}
		if err := cmd.RegisterFlagCompletionFunc(f.Name, complete); err != nil {
			panic(err) // registered twice
		}
	})
}

func environmentNames(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	var names []string
	for _, variable := range os.Environ() {
		name, _, _ := strings.Cut(variable, "=")
		names = append(names, name)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
