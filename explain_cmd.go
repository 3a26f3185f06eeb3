package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// explainOptions are the flags of explain.
type explainOptions struct {
	admin, tokenFile, config string
	caFile                   string
	file                     string
	endpoint, key            string
	tried, headers           []string
	json                     bool
}

// explainPatience is longer than an admin listener that lives takes for an answer.
const explainPatience = 15 * time.Second

func newExplainCommand() *cobra.Command {
	var o explainOptions
	cmd := &cobra.Command{
		Use:   "explain -f FILE",
		Short: "Ask a running warmroute where a request would go, and why",
		Long: `Send a request's body to the admin listener of a running warmroute, which tells
where it would go at this moment by the code that decides: what each backend
holds of the prompt, what it has to do, what that costs, and the choice in a
sentence. No replica hears of it, and nothing of it is remembered.

The admin listener and its token are those of the server's settings, as serve
reads them: --config or WARMROUTE_CONFIG, WARMROUTE_ADMIN,
WARMROUTE_ADMIN_TOKEN; or what --admin, --token-file and --ca-file say. What
decides the route beside the body goes along: headers of a session or a
priority with --header, and an API key by its name.`,
		Example: `  warmroute explain -f request.json
  echo '{"model":"m","messages":[{"role":"user","content":"Hello"}]}' | warmroute explain -f -
  warmroute explain -f request.json --tried gpu-0
  warmroute explain --admin http://gateway:9090 --token-file token -f request.json --json`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.NoArgs(cmd, args); err != nil {
				return err
			}
			if o.file == "" {
				return fmt.Errorf("-f is missing: name the file with the request's body, or - for the standard input")
			}
			_, err := o.header()
			return err
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.run(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	o.addTo(cmd.Flags())
	return cmd
}

func (o *explainOptions) addTo(f *pflag.FlagSet) {
	f.SortFlags = false
	f.StringVarP(&o.file, "file", "f", "", "`FILE` with the request's body, - for the standard input")
	f.StringVar(&o.admin, "admin", "", "`URL` of the admin listener (default: that of the settings)")
	f.StringVar(&o.tokenFile, "token-file", "", "read the admin token from `FILE` (default: that of the settings)")
	f.StringVar(&o.caFile, "ca-file", "", "trust the authorities in `FILE` over https (default: the settings' certificate; with --admin, the system's authorities)")
	f.StringVar(&o.config, "config", "", "the server's configuration `FILE`, else the one that WARMROUTE_CONFIG names")
	f.StringVar(&o.endpoint, "endpoint", "", "`PATH` that the request is for (default /v1/chat/completions)")
	f.StringVar(&o.key, "key", "", "`NAME` of the API key that it comes with, never the key itself")
	f.StringArrayVar(&o.tried, "tried", nil, "`NAME` of a backend that has failed the request already (repeatable)")
	f.StringArrayVarP(&o.headers, "header", "H", nil, "`HEADER` that steers, like 'X-Warmroute-Priority: 5' (repeatable)")
	f.BoolVar(&o.json, "json", false, "print the answer as the admin listener gives it")
}

// body is the request to be explained.
func (o *explainOptions) body(stdin io.Reader) ([]byte, error) {
	if o.file == "-" {
		return io.ReadAll(stdin)
	}
	return readRequest(o.file)
}
