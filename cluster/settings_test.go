package cluster

import (
	"crypto/tls"
	"reflect"
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
		{Settings{Mode: ModeSentinel, URL: "unix:///run/redis.sock?master_name=m"}, "invalid URL scheme"},
		{Settings{Mode: ModeSingle, URL: "redis://host?addr=other:6379"}, `unknown parameter "addr"`},
		{Settings{Mode: ModeCluster, URL: "redis://host?addr=other"}, "addr is not a host and a port"},
		{Settings{Mode: ModeCluster, URL: "redis://host/1"}, "invalid number of a database"},
		{Settings{Mode: ModeSingle, URL: "redis://host/x"}, "invalid number of a database"},
		{Settings{Mode: ModeSingle, URL: "redis://host/1/2"}, "invalid number of a database"},
		{Settings{Mode: ModeSingle, URL: "rediss://host?skip_verify=maybe"}, "skip_verify"},
		{Settings{Mode: ModeSingle, URL: "host:6379"}, "invalid URL scheme"},
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

func TestClientOptions(t *testing.T) {
	for _, c := range []struct {
		settings Settings
		want     clientOptions
	}{
		{Settings{Mode: ModeSingle, URL: "redis://"}, clientOptions{network: "tcp", addresses: []string{"localhost:6379"}}},
		{Settings{Mode: ModeSingle, URL: "redis://user:a%2Fb@[::1]:7000/2"},
			clientOptions{network: "tcp", addresses: []string{"[::1]:7000"}, login: login{"user", "a/b"}, database: 2}},
		{Settings{Mode: ModeSingle, URL: "redis://user@host?db=3", Password: "p"},
			clientOptions{network: "tcp", addresses: []string{"host:6379"}, login: login{"user", "p"}, database: 3}},
		{Settings{Mode: ModeSingle, URL: "unix://:p@/run/redis.sock?db=1"},
			clientOptions{network: "unix", addresses: []string{"/run/redis.sock"}, login: login{"", "p"}, database: 1}},
		{Settings{Mode: ModeSentinel, URL: "redis://s:sp@host:26379/1?master_name=m&addr=other:26379&username=u", Password: "p"},
			clientOptions{network: "tcp", addresses: []string{"host:26379", "other:26379"}, login: login{"u", "p"}, database: 1, masterName: "m", sentinelLogin: login{"s", "sp"}}},
		{Settings{Mode: ModeCluster, URL: "redis://host/0?addr=other:1&addr=third:2"},
			clientOptions{network: "tcp", addresses: []string{"host:6379", "other:1", "third:2"}}},
	} {
		c.want.mode = c.settings.Mode
		if got, err := c.settings.clientOptions(); err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%+v: %+v, %v, want %+v", c.settings, got, err, c.want)
		}
	}
	o, err := (&Settings{Mode: ModeCluster, URL: "rediss://host?skip_verify=true"}).clientOptions()
	if err != nil || o.tls == nil || o.tls.ServerName != "host" || !o.tls.InsecureSkipVerify || o.tls.MinVersion != tls.VersionTLS12 {
		t.Errorf("TLS %+v, %v", o.tls, err)
	}
}
