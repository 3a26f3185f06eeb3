package cli

import (
	"strings"
	"testing"
)

// Arguments that are missing, or too many, are described in the words of the command, and with an example.
func TestArgumentErrors(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"backends drain", "warmroute: name one or more backends, as in: warmroute backends drain 10.0.0.5:8000 10.0.0.6:8000\n"},
		{"backends undrain", "name one or more backends, as in: warmroute backends undrain 10.0.0.5:8000 10.0.0.6:8000\n"},
		{"backends remove", "name one or more backends, as in: warmroute backends remove 10.0.0.7:8000 --wait 10m\n"},
		{"backends add", "name the URL of one replica, as in: warmroute backends add http://10.0.0.7:8000 --wait 5m\n"},
		{"backends add http://a:1 http://b:1", "name the URL of one replica, as in: warmroute backends add http://10.0.0.7:8000 --wait 5m\n"},
		{"usage", "name one or more usage files, as in: warmroute usage /var/lib/warmroute/usage "},
		{"health http://a http://b", "name one URL or none, as in: warmroute health\n"},
		{"backends dran gpu-0", `unknown command "dran" for "warmroute backends"; did you mean drain?` + "\n"},
		{"backends gpu-0", `unknown command "gpu-0" for "warmroute backends"` + "\n"},
		{"drain gpu-0", "Did you mean this?\n\tbackends\n"},
	} {
		status, out, stderr := execute(t.Context(), t, strings.Fields(c.args)...)
		if status != 2 || out != "" || !strings.Contains(stderr, c.want) || strings.Contains(stderr, "arg(s)") {
			t.Errorf("%s: status %d, %s%s; want 2, %q", c.args, status, out, stderr, c.want)
		}
	}
	if status, out, _ := execute(t.Context(), t, "backends"); status != 0 || !strings.Contains(out, "Available Commands:") {
		t.Errorf("without a command: status %d, %s", status, out)
	}
}
