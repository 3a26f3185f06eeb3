package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

const (
	// groupAnnotation is where a flag's heading in the help stands.
	groupAnnotation = "warmroute_group"
	// helpWidth is what the help is wrapped at: the narrowest terminal that is usual.
	helpWidth = 80
)

// The groups of commands in the overview, in this order.
const (
	groupRun = "run"
	groupTry = "try"
)

const overview = `Warmroute stands in front of several vLLM replicas, speaks the OpenAI API, and
sends each request to the replica that will answer it soonest, counting the
prefix it already holds and the queue it would wait in.`

const exitCodes = `Exit codes:
  0  done, or ended as asked: a first SIGTERM or Ctrl-C lets requests finish
  1  failed while running; health: not alive
  2  the command line or the configuration has to be mended
A second SIGTERM or Ctrl-C ends a command at once (the shell sees 143 or 130).`

// groupFlags puts flags under a heading of their own in the help.
func groupFlags(flags *pflag.FlagSet, heading string, names ...string) {
	for _, name := range names {
		if err := flags.SetAnnotation(name, groupAnnotation, []string{heading}); err != nil {
			panic(err) // a flag that is not there
		}
	}
}

// noArguments is cobra.NoArgs with an error that says what to do.
func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("%s takes no arguments, and was given %q; a flag begins with --", cmd.CommandPath(), args[0])
}

func newHelpCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "help [COMMAND]",
		Short:   "Say what a command does",
		Example: "  warmroute help bench",
		Args: func(cmd *cobra.Command, args []string) error {
			if found, rest, err := cmd.Root().Find(args); err != nil || found == cmd.Root() && len(rest) > 0 {
				return unknownCommand(cmd.Root(), args)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			found, _, err := cmd.Root().Find(args)
			if err != nil {
				return err
			}
			writeHelp(cmd.OutOrStdout(), found)
			return nil
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			var names []string
			for _, c := range cmd.Root().Commands() {
				if !c.Hidden && len(args) == 0 {
					names = append(names, cobra.CompletionWithDesc(c.Name(), c.Short))
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
	}
}

// writeHelp writes all there is to say of a command.
func writeHelp(w io.Writer, cmd *cobra.Command) {
	about := strings.TrimSpace(cmd.Long)
	if about == "" {
		about = cmd.Short + "."
	}
	fmt.Fprintf(w, "%s\n\nUsage:\n  %s\n", about, usageLine(cmd))
	if cmd.HasAvailableSubCommands() {
		writeCommands(w, cmd)
	}
	if cmd.Example != "" {
		fmt.Fprintf(w, "\nExamples:\n%s\n", cmd.Example)
	}
	if !cmd.HasParent() {
		fmt.Fprintf(w, "\n%s\n\n\"warmroute COMMAND --help\" tells more of each.\n", exitCodes)
		return
	}
	writeFlags(w, cmd)
}

func usageLine(cmd *cobra.Command) string {
	if !cmd.HasParent() {
		return "warmroute COMMAND [flags]"
	}
	line := cmd.CommandPath() + strings.TrimPrefix(cmd.Use, cmd.Name())
	if cmd.HasAvailableLocalFlags() {
		line += " [flags]"
	}
	return line
}

func writeCommands(w io.Writer, cmd *cobra.Command) {
	write := func(title, group string) {
		first := true
		for _, c := range cmd.Commands() {
			if c.GroupID != group || c.Hidden {
				continue
			}
			if first {
				fmt.Fprintf(w, "\n%s:\n", title)
				first = false
			}
			fmt.Fprintf(w, "  %-11s %s\n", c.Name(), c.Short)
		}
	}
	for _, g := range cmd.Groups() {
		write(g.Title, g.ID)
	}
	write("Else", "")
}

// writeFlags writes the flags by their headings, in the order in which these
// first occur; those without one come last, under "Flags" where they are alone.
func writeFlags(w io.Writer, cmd *cobra.Command) {
	var headings []string
	groups := map[string]*pflag.FlagSet{}
	cmd.LocalFlags().SortFlags = cmd.Flags().SortFlags
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if f.Name == "help" || f.Hidden {
			return
		}
		heading := "Flags"
		if h := f.Annotations[groupAnnotation]; len(h) > 0 {
			heading = h[0]
		}
		if groups[heading] == nil {
			groups[heading] = pflag.NewFlagSet("", pflag.ContinueOnError)
			groups[heading].SortFlags = cmd.Flags().SortFlags
			headings = append(headings, heading)
		}
		shown := *f
		showDefault(&shown, cmd)
		groups[heading].AddFlag(&shown)
	})
	slices.SortStableFunc(headings, func(a, b string) int { return groupPlace(cmd, groups[a]) - groupPlace(cmd, groups[b]) })
	for _, heading := range headings {
		fmt.Fprintf(w, "\n%s:\n%s\n", heading, flagUsages(groups[heading]))
	}
}

func flagUsages(flags *pflag.FlagSet) string {
	short := false
	flags.VisitAll(func(f *pflag.Flag) { short = short || f.Shorthand != "" })
	if short {
		return strings.TrimRight(flags.FlagUsagesWrapped(helpWidth), "\n")
	}
	// The room that pflag leaves for short forms is better used.
	usages := strings.TrimRight(flags.FlagUsagesWrapped(helpWidth+4), "\n")
	return strings.ReplaceAll("\n"+usages, "\n      ", "\n  ")[1:]
}

// groupPlace is where a group's first flag was defined.
func groupPlace(cmd *cobra.Command, group *pflag.FlagSet) int {
	place, at := -1, 0
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if place < 0 && group.Lookup(f.Name) != nil {
			place = at
		}
		at++
	})
	return place
}

// showDefault gives a flag that stands for a setting the setting's default.
func showDefault(f *pflag.Flag, cmd *cobra.Command) {
	if f.Value.Type() == "stringSlice" && f.DefValue == "" {
		f.DefValue = "[]" // what pflag takes for none
	}
	setting, stands := flagSettings()[f.Name]
	if f.DefValue != "" || !stands || cmd.Flags().Lookup("log-level") == nil {
		return
	}
	var defaults map[string]any
	if yaml.Unmarshal(defaultsYAML, &defaults) != nil {
		return // a test reads it
	}
	var value any = defaults
	for _, key := range strings.Split(setting, ".") {
		section, _ := value.(map[string]any)
		value = section[key]
	}
	f.Usage += fmt.Sprintf(" (default %v)", value)
}
