package config

import (
	"reflect"
	"strings"
	"time"
)

// setting is one setting with its value. The tags of its field say what values it may have: range:"1..10",
// range:"0|64..4096" for 0 as well, range:"10ms.." without a maximum, and oneof:"text json".
type setting struct {
	path    string // such as poll.interval
	name    string // the last part of it
	tag     reflect.StructTag
	value   reflect.Value
	restart bool // a change takes effect at a restart
}

// settingsOf returns the settings of a struct, in order, with those of its sections. prefix is the beginning
// of their paths, and restart is whether all of them need one.
func settingsOf(v reflect.Value, prefix string, restart bool) (list []setting) {
	for i := range v.NumField() {
		field := v.Type().Field(i)
		name, option, _ := strings.Cut(field.Tag.Get("mapstructure"), ",")
		needsRestart := restart || field.Tag.Get("reload") == "no"
		switch {
		case !field.IsExported() || name == "-":
		case option == "squash":
			list = append(list, settingsOf(v.Field(i), prefix, needsRestart)...)
		case field.Type.Kind() == reflect.Struct && field.Type != reflect.TypeFor[time.Time]():
			list = append(list, settingsOf(v.Field(i), prefix+name+".", needsRestart)...)
		default:
			list = append(list, setting{prefix + name, name, field.Tag, v.Field(i), needsRestart})
		}
	}
	return list
}

func settingNames[T any]() (names []string) {
	for _, s := range settingsOf(reflect.ValueOf(*new(T)), "", false) {
		names = append(names, s.name)
	}
	return names
}

// differingSettings returns the settings in which two structs of one type differ.
func differingSettings(a, b any) (differing []setting) {
	others := settingsOf(reflect.ValueOf(b), "", false)
	for i, s := range settingsOf(reflect.ValueOf(a), "", false) {
		if !reflect.DeepEqual(s.value.Interface(), others[i].value.Interface()) {
			differing = append(differing, s)
		}
	}
	return differing
}

// Diff returns the paths of the settings in which two configurations differ: those that a reload applies and
// those that need a restart. Values are left out, since some are secret.
func Diff(a, b *Config) (reloadable, restart []string) {
	for _, s := range differingSettings(*a, *b) {
		if s.restart {
			restart = append(restart, s.path)
		} else {
			reloadable = append(reloadable, s.path)
		}
	}
	return reloadable, restart
}

// CheckNotWeakened returns an Errors if c drops a protection that old has: the API keys, the admin token or the
// isolation of tenants, or names a file for the admin token that does not exist. A truncated file looks like that,
// because the defaults are open; so a reload refuses it, and a restart is needed to apply it.
func (c *Config) CheckNotWeakened(old *Config) error {
	const restart = "; if this is intended, restart or do a binary upgrade"
	var errs errorList
	if len(old.Keys) > 0 && len(c.Keys) == 0 {
		errs.add("keys", "refusing to remove all keys: access would become open%s", restart)
	}
	switch {
	case c.AdminTokenMissing():
		errs.add("admin_token_file", "open %s: no such file or directory; only a start creates it", c.AdminTokenFile)
	case old.AdminToken != "" && c.AdminToken == "":
		errs.add("admin_token", "refusing to remove the admin token: admin access would become open%s", restart)
	}
	if old.Tenant == "isolate" && c.Tenant != "isolate" {
		errs.add("tenant", "refusing to end the isolation of tenants: routing would reveal what others sent%s", restart)
	}
	return errs.err()
}
