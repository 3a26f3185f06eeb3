package cluster

import (
	"strings"
	"testing"
)

func TestCheckSettings(t *testing.T) {
	for _, c := range []struct {
		settings Settings
		want     string // in the error; "": none
	}{
		{Settings{Mode: ModeSingle, URL: "redis://host:6379/2"}, ""},
		{Settings{Mode: ModeSingle, URL: "rediss://user:secret@host:6379"}, ""},
		{Settings{Mode: ModeSingle, URL: "unix:///run/redis.sock"}, ""},
		{Settings{Mode: ModeSentinel, URL: "redis://host:26379?master_name=m&addr=other:26379"}, ""},
		{Settings{Mode: ModeCluster, URL: "redis://host:6379?addr=other:6379"}, ""},
		{Settings{Mode: ModeSingle, URL: "http://user:secret@host"}, "invalid URL scheme"},
		{Settings{Mode: ModeSingle, URL: "redis://user:sec%ret@host"}, "is not a valid URL"},
		{Settings{Mode: ModeSingle, URL: "redis://user:secret@host:port"}, "is not a valid URL"},
		{Settings{Mode: ModeCluster, URL: "unix:///run/redis.sock"}, "invalid URL scheme"},
		{Settings{Mode: ModeSentinel, URL: "redis://host:26379"}, "master_name"},
		{Settings{Mode: ModeSingle, URL: "redis://host", CA: "x", CAFile: "f"}, "rediss://"},
		{Settings{Mode: ModeSingle, URL: "rediss://host", CA: "x", CAFile: "f"}, "f contains no certificate"},
	} {
		err := CheckSettings(c.settings)
		if c.want == "" {
			if err != nil {
				t.Errorf("%+v: %v", c.settings, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%+v: %v, want an error with %q", c.settings, err, c.want)
		}
	}
}
